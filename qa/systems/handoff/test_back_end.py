"""What two back ends can do to each other, and who has which rows. The scenario shows order, groups and crashes."""

from __future__ import annotations

import random

import pytest
from django.db import connection, transaction

from django_pglock.models import Task
from django_pglock.models import Worker as WorkerRow
from django_pglock.worker import Worker
from example_project.systems.handoff.back_end import hand_over, handle, new, oldest
from example_project.systems.handoff.models import Request, Sheet
from example_project.systems.handoff.scenario import (
    WRONG_ENTRIES,
    old_snapshot,
    pages_read,
    rows_by_process,
    run_scenario,
)
from example_project.systems.handoff.search import PARTS, Entry, Order
from example_project.systems.handoff.tasks import update
from tests.conftest import NEVER
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def ask(*lines, sheet="plan"):
    """Hand over a create if there is no sheet yet, and updates."""
    hand_over(
        Request(kind="create", sheet=sheet), *(Request(kind="update", sheet=sheet, line=str(line)) for line in lines)
    )


def work():
    """Do what a back end does when it is woken."""
    return oldest.claim_each(100, handle, failed={"status": "error"})


def test_while_a_create_runs_its_updates_wait_and_other_sheets_go_on(in_threads):
    """No back end takes the updates and returns them: they are not among the oldest of their sheets."""
    ask("a")
    ask("b", sheet="other")
    with oldest.claim(1) as [create]:
        assert (create.kind, create.sheet) == ("create", "plan")
        assert in_threads(lambda _: work(), 1) == [2]
    assert set(new.values_list("sheet", "kind")) == {("plan", "create"), ("plan", "update")}
    assert work() == 2


def test_the_database_says_which_session_has_which_rows(in_threads):
    ask("a")
    with oldest.claim(1) as [create]:
        [found] = in_threads(lambda _: rows_by_process("table"), 1)
        assert found == [(connection.connection.info.backend_pid, [create.id])]
    assert rows_by_process("table") == []


def test_the_database_says_which_worker_has_which_tasks(worker, eventually):
    Sheet.objects.create(name="plan")
    update.enqueue(sheet="plan", line="a")
    with transaction.atomic():
        Sheet.objects.select_for_update().get()
        worker()
        process = WorkerRow.objects.get().pid
        eventually(lambda: rows_by_process("tasks") == [(process, [Task.objects.get().pk])])
    eventually(lambda: Task.objects.get().status == "SUCCESSFUL")
    assert rows_by_process("tasks") == []


def test_updates_of_a_missing_sheet_become_errors_and_block_no_other_request():
    hand_over(*(Request(kind="update", sheet="nobody", line=line) for line in "ab"))
    ask("c")
    assert work() == 4
    assert set(Request.objects.filter(sheet="nobody").values_list("status", flat=True)) == {"error"}
    assert Sheet.objects.get().lines == ["c"]


def test_a_saved_start_id_keeps_searches_short_during_an_open_transaction():
    with old_snapshot():
        for start in range(0, 1000, 100):
            ask(*range(start, start + 100), sheet=str(start))
        while work():
            pass
        with transaction.atomic(), connection.cursor() as cursor:
            # Otherwise PostgreSQL might scan the whole small table.
            cursor.execute("SET LOCAL enable_seqscan = off")
            cursor.execute("SET LOCAL enable_bitmapscan = off")
            from_the_start, behind = pages_read(0), pages_read(Request.objects.latest("id").id)
    assert from_the_start > 3 * behind


# The search table follows 17 tables, whatever changes them, also while workers are killed or down.


def value(statement):
    return execute_sql(statement)[0][0]


def change_everything():
    """Change all tables in the ways that there are."""
    orders = Order.objects.bulk_create(Order(text=f"order {number}") for number in range(30))
    first = orders[0].pk
    for part in PARTS:
        table = part._meta.db_table
        part.objects.create(order=orders[0], text=f"one {table}")
        part.objects.bulk_create(part(order=order, text=f"many {table}") for order in orders)
        with connection.cursor() as cursor, cursor.copy(f'COPY "{table}" (order_id, text) FROM STDIN') as lines:
            lines.write(f"{first + 1}\tcopied {table}\n")
        execute_sql(f"UPDATE \"{table}\" SET text = 'changed {table}' WHERE (order_id - {first}) % 3 = 0")
        part.objects.filter(order_id=first + 4).update(order=first + 5)
        execute_sql(f'DELETE FROM "{table}" WHERE (order_id - {first}) % 7 = 0')
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            part.objects.update(text="never")
            raise ZeroDivisionError
    Order.objects.filter(pk__gt=first + 25).delete()


def test_nothing_is_missed_while_no_worker_runs():
    change_everything()
    assert Task.objects.count() < 150
    assert not Entry.objects.exists()
    Worker(drain=True).run()
    assert value(WRONG_ENTRIES) == 0
    assert Entry.objects.count() == Order.objects.count() == 26
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}
    found = Entry.objects.filter(text__contains="copied handoff_warranty")
    assert found.count() == 1


def write(seed, count):
    """Change rows at random, in transactions of which some are rolled back."""
    chance = random.Random(seed)
    ids = list(Order.objects.values_list("pk", flat=True))
    for number in range(count):
        part = chance.choice(PARTS)
        with transaction.atomic():
            part.objects.create(order_id=chance.choice(ids), text=f"text {seed} {number}")
            # One statement that locks rows of others: two could deadlock.
            changes = chance.choice(({"text": f"changed {seed} {number}"}, {"order": chance.choice(ids)}))
            part.objects.filter(order_id=chance.choice(ids)).update(**changes)
            transaction.set_rollback(chance.random() < 0.1)


def test_the_entries_follow_while_workers_are_killed(fleet, process, eventually):
    Order.objects.bulk_create(Order(text=f"order {number}") for number in range(20))
    workers = [fleet.start("runlockworker", "--threads", "2", "--no-reload") for _ in range(2)]
    writers = [process(write, seed, 40) for seed in range(2)]
    eventually(lambda: Entry.objects.count() > 5)
    workers[0].kill()
    assert [writer.wait(NEVER) for writer in writers] == [0, 0]
    eventually(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists(), why=fleet.output())
    assert value(WRONG_ENTRIES) == 0


# The same requests through tasks and through the table, with kills of back ends in between.


def test_both_planes_make_the_sheets_that_the_requests_ask_for(harness):
    run_scenario(harness, count=1000, sheets=50, orders=100)
    told = harness.judge()
    assert told.count("SIGKILL") == 4
    assert "One UPDATE changes 200 rows, two of each order: 1 task." in told
