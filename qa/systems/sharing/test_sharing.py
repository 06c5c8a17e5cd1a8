"""Rows that nodes share: each row is processed by one node, also if nodes are killed and rows fail."""

from __future__ import annotations

import pytest
from django.db import transaction
from django.db.models import Count
from django.utils import timezone

from django_pglock.models import Lease
from example_project.systems.sharing import scenario
from example_project.systems.sharing.models import Report, Result, Row
from example_project.systems.sharing.processing import MOST_ATTEMPTS, process_batch
from example_project.systems.sharing.report import write_report
from qa.systems.sharing.nodes import GATE, process_behind_the_gate
from tests.conftest import NEVER
from tests.db.locks.sessions import Somebody
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)

WAITING_AT_THE_GATE = (
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 72004 AND NOT granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


def arrive(*data: object) -> list[Row]:
    return Row.objects.bulk_create(Row(data=str(each)) for each in data)


def free_rows() -> list[Row]:
    """Return the rows that no node holds."""
    with transaction.atomic():
        return list(Row.objects.filter(processed=False).select_for_update(skip_locked=True))


def test_four_nodes_hold_equal_shares_and_the_share_of_a_killed_one_is_free_again(process, eventually):
    """All four are in the middle of their batch at the same time, so none waits for another."""
    arrive(*range(40))
    gate = Somebody()
    gate.ask("SELECT pg_advisory_lock(%s)", GATE)
    nodes = [process(process_behind_the_gate, f"node {number}") for number in range(4)]
    eventually(lambda: gate.ask(WAITING_AT_THE_GATE) == 4)
    assert free_rows() == []

    nodes[3].kill()
    nodes[3].wait()
    eventually(lambda: len(free_rows()) == 10)
    gate.leaves()
    assert [node.wait(NEVER) for node in nodes[:3]] == [0, 0, 0]
    shares = dict(Result.objects.order_by().values_list("node").annotate(Count("pk")))
    assert sorted(shares.values()) == [10, 10, 10]

    assert process_batch("node 4", limit=40) == 10
    assert Result.objects.values("row").distinct().count() == Result.objects.count() == 40


def test_rows_that_failed_come_after_those_that_did_not():
    arrive("no number", 1, 2)
    process_batch("node 1", limit=1)
    process_batch("node 1", limit=2)
    assert Row.objects.filter(processed=True).count() == 2


def test_without_a_claim_two_nodes_read_the_same_row(in_threads):
    """A plain query, also inside of a transaction, does not wait, so both nodes process the row."""
    arrive(1, 2)
    waiting = Row.objects.filter(processed=False).order_by("id")
    with transaction.atomic():
        mine = waiting.first()
        [[theirs, claimed]] = in_threads(lambda _: [waiting.first(), process_batch("node 2")], 1)
        assert mine == theirs
        assert claimed == 2


def test_a_claim_reads_no_processed_row():
    Row.objects.bulk_create(Row(data="1", processed=number > 5) for number in range(3000))
    execute_sql("ANALYZE sharing_row")
    with transaction.atomic():
        rows = Row.objects.filter(processed=False, attempts__lt=MOST_ATTEMPTS).order_by("attempts", "id")
        plan = rows.select_for_update(skip_locked=True)[:10].explain()
    assert "sharing_row_waiting" in plan
    assert "Sort" not in plan


def test_a_paused_node_cannot_finish_its_report_after_another_has_begun(monkeypatch):
    """While it reads the results its lease expires, and another node begins."""

    def stand_still():
        Report.objects.create(token=Lease.objects.get().token + 1, node="node 2", clock=timezone.now())
        return 5

    monkeypatch.setattr(Result.objects, "count", stand_still)
    assert not write_report("node 1")
    assert not Report.objects.exclude(ended_at=None).exists()


def test_the_sharing_system_has_no_violation_under_load(harness, monkeypatch):
    monkeypatch.setattr(scenario, "ROWS", 80)
    scenario.run_scenario(harness)
    harness.judge()
    assert "The clocks of two nodes were wrong by an hour" in [finding.claim for finding in harness.findings]
