"""Hostile names are stored and returned unchanged, or are refused at once."""

from __future__ import annotations

import io
import logging
from datetime import timedelta
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db.models.functions import Now

from django_pglock import Lease, lock, lock_all, semaphore
from django_pglock.errors import ConfigurationError, LockKeyError, TaskArgumentsError
from django_pglock.locks.statements import LONGEST_NAME
from django_pglock.models import AdvisoryLock, Queue, Schedule, Task, Worker
from django_pglock.models import Lease as LeaseRow
from django_pglock.store.wake import channel_of
from django_pglock.tasks.compat import InvalidTask
from django_pglock.worker.queues import Queues
from tests.db.locks.sessions import Somebody
from tests.db.store.workers import add_sleeping_worker
from tests.db.worker.conftest import make_upkeep
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks as sample

pytestmark = pytest.mark.django_db(transaction=True)

FORGED = "\n2026-01-01 00:00:00 ERROR forged"
HARMLESS = {
    "quotes": "'\"`''\"\"",
    "percent": "%s %d %(x)s %% 100% %",
    "backslash": "\\ \\' \\n \\",
    "sql": "'; DROP TABLE django_pglock_task; --",
    "braces": "{0} {x} {{}} {task} {",
    "dollar": "$1 $$ $a$ :x @y",
    "comment": "*/ SELECT 1 /* -- */",
    "newlines": f"a{FORGED}\r\t\v\x85\u2028b",
    "bidi": "abc\u202egnp.exe\u2066",
    "escape": "\x1b[31mred\x07",
    "spaces": "  a  ",
    "unicode": "𝄞👩‍💻é",
    "html": "<script>alert(1)</script>\"' onclick=x",
    "address": "../a/b?c=d&e#f;%2F_5F",
    "as_long_as_can_be": "𝄞" * 128,
}
LONG = "x" * 10_000
NUL, SURROGATE = "a\x00b", "a\udcffb"


def refused(*names):
    """Run a test with each name that its kind refuses."""
    known = {"empty": "", "long": LONG, "nul": NUL, "surrogate": SURROGATE}
    return pytest.mark.parametrize("name", [known[each] for each in names], ids=names)


@pytest.fixture(autouse=True)
def no_line_is_forged(caplog):
    """Check that no line of the log begins with a part of the name."""
    caplog.set_level(logging.DEBUG)
    yield
    # Django's own log of statements shows them as they are.
    ours = [each for each in caplog.get_records("call") if each.name.startswith("django_pglock")]
    assert FORGED not in "".join(f"{each.getMessage()}{each.exc_text or ''}" for each in ours)


# Queues


def test_a_queue_of_any_valid_name_is_enqueued_and_claimed(claim):
    for name in HARMLESS.values():
        result = sample.echo.using(queue_name=name).enqueue(name)
        [claimed] = claim(queue=name)
        row = Task.objects.get(queue=name)
        assert (row.queue, claimed.queue, row.args, result.task.queue_name) == (name, name, [name], name)
        assert row.status == "RUNNING"
    assert {each.queue for each in Task.objects.queue_counts()} == {*HARMLESS.values()}


def test_commands_take_a_queue_of_any_valid_name():
    for name in HARMLESS.values():
        sample.nothing.using(queue_name=name).enqueue()
        out = io.StringIO()
        call_command("locktasks", "pause", f"--reason={name}", "--", name, stdout=out)
        assert Queue.objects.get(pk=name).reason == name
        call_command("locktasks", "status", stdout=out)
        call_command("locktasks", "list", f"--queue={name}", stdout=out)
        call_command("locktasks", "resume", "--", name, stdout=out)
        assert FORGED not in out.getvalue()
        assert "\x1b" not in out.getvalue()
        assert "\u202e" not in out.getvalue()
        call_command("locktasks", "cancel", f"--queue={name}", "--yes", stdout=out)
        assert Task.objects.get(queue=name).status == "CANCELLED"


def test_the_queues_of_a_worker_take_any_valid_name():
    for name in HARMLESS.values():
        if "*" in name:
            with pytest.raises(ConfigurationError, match="at the end"):
                Queues([name])
            continue
        queues = Queues([f"{name}=2" if "=" in name else name])
        assert queues.serves(name)
        assert not queues.serves(f"{name}x")


@refused("empty", "long", "nul", "surrogate")
def test_invalid_names_of_queues_are_refused(name):
    with pytest.raises(InvalidTask, match="A queue's name"):
        sample.nothing.using(queue_name=name).enqueue()
    for ask in (Queue.objects.pause, Queue.objects.resume):
        with pytest.raises(ValueError, match="A queue's name"):
            ask(name)
    if name != NUL:  # no command line can have one
        for command in ("pause", "resume"):
            with pytest.raises(CommandError, match=r"A queue's name|is not valid text"):
                call_command("locktasks", command, name)
    assert not Task.objects.exists()
    assert not Queue.objects.exists()


@pytest.mark.parametrize("name", [HARMLESS["as_long_as_can_be"], HARMLESS["newlines"], HARMLESS["quotes"]])
def test_a_notification_carries_the_whole_name(name):
    listener = Somebody()
    try:
        worker = add_sleeping_worker()
        with listener.connection.cursor() as cursor:
            cursor.execute(f"LISTEN {channel_of(worker.parent)}")
        sample.nothing.using(queue_name=name).enqueue()
        [note] = listener.connection.connection.notifies(timeout=60, stop_after=1)
        assert note.payload == f"{worker.pk} 0 {name}"
        assert len(note.payload.encode()) < 8000
    finally:
        listener.connection.close()


# Locks


def test_a_lock_shows_its_name_to_holders_and_waiters():
    for name in (*HARMLESS.values(), LONG, NUL):
        with lock(name) as handle:
            assert handle.name == name
            held = AdvisoryLock.objects.for_name(name).get()
            shown = held.name
            # In a comment of the statement, where nothing may end it, and short enough for pg_stat_activity.
            assert shown in (None, name[:LONGEST_NAME]) or "?" in shown or shown.endswith("…")
            assert AdvisoryLock.objects.held().count() == 1
            other = Somebody()
            assert not other.ask("SELECT pg_try_advisory_lock(%s)", held.key)
            other.connection.close()
        for several in (lock_all(name, f"{name}2"), semaphore(name, limit=2), lock("a", name), lock(name, timeout=1)):
            with several as handle:
                assert handle.is_held
        assert not AdvisoryLock.objects.exists()
        assert Task.objects.count() == 0, "the table is there"


@refused("empty", "surrogate")
def test_invalid_names_of_locks_are_refused(name):
    for ask in (lock, semaphore, Lease):
        with pytest.raises(LockKeyError):
            ask(name, **({"limit": 1} if ask is semaphore else {})).acquire()
    decorated = lock("a:{value}")(lambda value: None)
    with pytest.raises(LockKeyError):
        decorated(name)


def test_a_lease_takes_any_valid_name_and_owner():
    for name in (*HARMLESS.values(), LONG):
        with Lease(name, ttl=60, owner=name) as lease:
            assert lease.name == name
            row = LeaseRow.objects.get(name=name)
            assert (row.name, row.owner, row.token) == (name, name, 1)
            assert FORGED not in repr(row)
            assert FORGED not in repr(
                [Task(queue=name), Worker(name=name), Schedule(name=name, task_path=name, expression=name)]
            )
        assert LeaseRow.objects.filter(name=name).exists()


def test_invalid_names_and_owners_of_leases_are_refused():
    with pytest.raises(LockKeyError, match="NUL"):
        Lease(NUL, ttl=60).acquire()
    for owner in (NUL, SURROGATE, 5, None):
        with pytest.raises(ValueError, match="owner"):
            Lease("a", ttl=60, owner=owner)
    assert not LeaseRow.objects.exists()


# Keys of tasks

KEYED = {
    "lock": (lambda name: keyed.step.enqueue(name), "lock_key"),
    "concurrency": (lambda name: keyed.call.enqueue(name), "lock_key"),
    "unique": (lambda name: keyed.rebuild.enqueue(name), "unique_key"),
    "group": (lambda name: keyed.digest.enqueue(user=name, text="x"), "group_key"),
    "fair": (lambda name: keyed.serve.enqueue(name), "fair_key"),
    "rate": (lambda name: keyed.trickle.enqueue(tenant=name), "lock_key"),
}


@pytest.mark.parametrize("kind", KEYED)
def test_each_argument_makes_its_own_key(kind, claim):
    enqueue, column = KEYED[kind]
    names = [*HARMLESS.values(), *(f"{name}2" for name in HARMLESS.values()), LONG, f"{LONG}2"]
    for name in names:
        enqueue(name)
    rows = list(Task.objects.order_by("id"))
    assert len({getattr(row, column) for row in rows}) == len(names)
    assert {row.status for row in rows} == {"READY"}, "each has a key of its own"
    for name, row in zip(names, rows, strict=True):
        assert name in [*row.args, *row.kwargs.values()]
        if len(name) < 100:
            assert name.replace("%", "%25").replace(":", "%3A") in getattr(row, column)
    if kind != "fair":
        assert {each.id for each in claim(100)} == {row.pk for row in rows}


@refused("empty", "nul", "surrogate")
def test_invalid_values_for_keys_are_refused(name):
    for enqueue, _ in KEYED.values():
        with pytest.raises((TaskArgumentsError, LockKeyError)):
            enqueue(name)
    assert not Task.objects.exists()


# The messages of workers about rows


def test_unknown_task_paths_are_rescued_and_reported(eventually, worker, caplog):
    """The paths are rescued and reported, but make no additional lines in the log."""
    names = list(HARMLESS.values())
    dates = {"last_attempted_at": Now() - timedelta(hours=1), "started_at": Now()}
    for name in names:
        Task.objects.create(
            queue=name, backend="default", task_path=name, status="RUNNING", worker=uuid4(), attempts=1, **dates
        )
    worker(queues=["other"])
    eventually(lambda: {*Task.objects.values_list("status", flat=True)} == {"READY"})
    # A thread writes the records.
    eventually(lambda: sum("was taken back" in each.getMessage() for each in caplog.records) == len(names))
    assert [(row.task_path, row.queue) for row in Task.objects.order_by("id")] == [(name, name) for name in names]
    unknown = Task.objects.unknown()
    assert sorted(each[:3] for each in unknown) == sorted((name, name, 1) for name in names)
    make_upkeep()._warn()
    for said in ("which no running worker has imported", "was taken back"):
        lines = [each.getMessage() for each in caplog.records if said in each.getMessage()]
        assert [name for name in names if not any(repr(name) in line for line in lines)] == []
