"""The runs of a schedule are found one from the other, by their ids."""

from __future__ import annotations

from django_pglock.store.schedule_runs import SCHEDULE_RUNS, SCHEDULE_RUNS_ARCHIVED
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, PATH, executed, indexes, nodes
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "SCHEDULE_RUNS": Call(filled(SCHEDULE_RUNS), (backlog.ids[-1], PATH, PATH, BATCH)),
    }


def test_each_run_is_found_by_the_id_that_the_next_one_has(plans):
    plans.check()


def test_runs_in_the_archive_are_found_by_their_ids(archived):
    plan = executed(filled(SCHEDULE_RUNS_ARCHIVED), (archived[-1], PATH, PATH, 20))
    assert "Seq Scan" not in {node["Node Type"] for node in nodes(plan)}
    assert any("archivedtask" in name for name in indexes(plan))
