"""Old code meets new rows, and new code meets old rows. What does not fit together fails aloud and keeps the data."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock import task
from django_pglock.conf import get_settings
from django_pglock.models import AdvisoryLock, Attempt, Schedule, Task
from django_pglock.models import Worker as WorkerRow
from django_pglock.store import schedules
from django_pglock.store.schedules import ScheduleKeeper
from django_pglock.tasks import registry
from django_pglock.tasks.options import Rate, Unique
from django_pglock.testing import run_tasks

pytestmark = pytest.mark.django_db(transaction=True)

calls = []


@pytest.fixture(autouse=True)
def _a_project(monkeypatch):
    """A project with one function. Functions of the tests' other modules would have options that this one lacks."""
    calls.clear()
    monkeypatch.setattr(registry, "_definitions", {})


def deploy(function, name="send", **options):
    """Make a function the present version of a task function of this module."""
    function.__module__, function.__qualname__ = __name__, name
    registry._definitions.pop(f"{__name__}.{name}", None)
    return task(**options)(function)


def run():
    """Run all tasks that are due. Returns the status of each task."""
    run_tasks(until="due")
    return list(Task.objects.order_by("id").values_list("status", flat=True))


def one(order, text="none"):
    calls.append((order, text))


def several(calls_of_group):
    calls.append(calls_of_group)


def test_a_group_that_is_added_refuses_waiting_calls_with_positional_arguments():
    """Their names are not known any more. The tasks keep them, and run when a user retries them with the old code."""
    deploy(one, max_attempts=3).enqueue(7, "first")
    deploy(several, group="{order}", max_attempts=3)
    assert run() == ["FAILED"]
    assert calls == []
    [attempt] = Attempt.objects.all()
    assert attempt.exception_path == "django_pglock.errors.TaskArgumentsError"
    assert "has a group, so its calls take only keyword arguments" in attempt.traceback
    deploy(one)
    assert Task.objects.all().retry() == 1
    assert run() == ["SUCCESSFUL"]
    assert calls == [(7, "first")]


def test_a_group_that_is_added_gets_waiting_calls_with_keyword_arguments():
    deploy(one).enqueue(order=7, text="first")
    deploy(several, group="{order}").enqueue(order=7, text="second")
    assert run() == ["SUCCESSFUL"] * 2
    assert calls == [[{"order": 7, "text": "first"}], [{"order": 7, "text": "second"}]]


def test_a_group_call_leaves_out_waiting_calls_with_positional_arguments():
    """As of a program that writes rows. The others of the group run."""
    send = deploy(several, group="{order}")
    for text in ("first", "second", "third"):
        send.enqueue(order=7, text=text)
    Task.objects.filter(kwargs__text="second").update(args=[7, "second"], kwargs={})
    assert run() == ["SUCCESSFUL", "FAILED", "SUCCESSFUL"]
    assert calls == [[{"order": 7, "text": "first"}, {"order": 7, "text": "third"}]]


def test_a_group_that_is_removed_calls_the_function_for_each_waiting_task():
    send = deploy(several, group="{order}")
    for text in ("first", "second"):
        send.enqueue(order=7, text=text)
    deploy(one)
    assert run() == ["SUCCESSFUL"] * 2
    assert calls == [(7, "first"), (7, "second")]


def test_a_function_that_became_async_runs_no_call_that_asks_for_a_transaction():
    deploy(one).using(atomic=True, max_attempts=3).enqueue(7)

    async def one_async(order):
        calls.append(order)

    deploy(one_async)
    assert run() == ["FAILED"]
    assert calls == []
    [attempt] = Attempt.objects.all()
    assert attempt.exception_path == "django_pglock.errors.TaskOptionError"


def test_an_advisory_lock_that_is_added_holds_for_waiting_tasks():
    """They have no lock key. Its name is that of their arguments."""

    def look(order):
        calls.append(AdvisoryLock.objects.for_name("order:7").held().count())

    deploy(look).enqueue(7)
    deploy(look, lock="order:{order}", advisory=True).enqueue(7)
    assert run() == ["SUCCESSFUL"] * 2
    assert calls == [1, 1]


# Functions and options


def with_context(context, order, text="none"):
    calls.append((order, text))


async def one_async(order, text="none"):
    calls.append((order, text))


def one_more(order, text="none", language="English"):
    calls.append((order, text))


def one_more_without_default(order, language):
    raise AssertionError("it must not run")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (one, with_context),
        (one, one_async),
        (one, one_more),
        (with_context, one_async),
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("is_reversed", [False, True], ids=["old row", "new row"])
def test_another_version_of_a_function_runs_the_calls_that_fit_it(old, new, is_reversed):
    first, second = (new, old) if is_reversed else (old, new)
    deploy(first, takes_context=first is with_context).enqueue(7, text="first")
    deploy(second, takes_context=second is with_context)
    assert run() == ["SUCCESSFUL"]
    assert calls == [(7, "first")]


@pytest.mark.parametrize(
    ("first", "keywords", "second"),
    [(one, {}, one_more_without_default), (one_more, {"language": "French"}, one)],
    ids=["old row without the argument", "new row with the argument"],
)
def test_arguments_that_do_not_fit_fail_and_are_kept(first, keywords, second):
    deploy(first).enqueue(7, **keywords)
    deploy(second)
    assert run() == ["FAILED"]
    assert "TypeError" in Attempt.objects.get().traceback
    deploy(first)
    assert Task.objects.all().retry()
    assert run() == ["SUCCESSFUL"]
    assert calls == [(7, "none")]


def test_calls_of_a_function_that_is_removed_or_renamed_wait_for_it():
    deploy(one).enqueue(7)
    registry._definitions.pop(f"{__name__}.send")
    assert run() == ["READY"]
    assert Task.objects.get().attempts == 0
    deploy(one)
    assert run() == ["SUCCESSFUL"]


OPTIONS = [
    {"priority": 5},
    {"queue_name": "other"},
    {"max_attempts": 3},
    {"max_snoozes": 3},
    {"backoff": 9.0, "retry_on": ValueError},
    {"atomic": True},
    {"timeout": 60.0},
    {"lock": "order:{order}"},
    {"lock": "text:{text}"},
    {"lock": "order:{order}", "concurrency": 2},
    {"lock": "order:{order}", "advisory": True},
    {"fair": "order:{order}"},
    {"rate": "1000/s"},
    {"rate": Rate(500, key="order:{order}")},
    {"unique": True},
    {"unique": Unique("order:{order}", while_="unfinished")},
    {"keep_result": 3600},
    {"redact": True},
    {"capture_logs": True},
    {"every": 3600.0},
]
#: The columns that a call has from its options. They say how the call was meant, whatever the code says today.
OF_THE_CALL = (
    *("queue", "priority", "max_retries", "lock_key", "concurrency", "fair_key", "unique_key", "unique_scope"),
    *("keep_result", "group_key", "meta"),
)


CHANGES = [
    *[({}, each) for each in OPTIONS],
    *[(each, {}) for each in OPTIONS],
    ({"lock": "order:{order}"}, {"lock": "text:{text}"}),
    ({"lock": "order:{order}"}, {"rate": "1000/s"}),
    ({"rate": "1000/s"}, {"fair": "order:{order}", "rate": "500/s"}),
    ({"unique": True}, {"unique": Unique("order:{order}")}),
]


def test_waiting_calls_keep_their_options_and_run_whatever_the_code_says_today():
    for number, (before, _) in enumerate(CHANGES):
        deploy(lambda order=7, text="none": None, f"send_{number}", **before).enqueue(number)
    columns = list(Task.objects.order_by("id").values(*OF_THE_CALL))
    for number, (_, after) in enumerate(CHANGES):
        deploy(lambda order=7, text="none": calls.append((order, text)), f"send_{number}", **after)
    statuses = run()
    assert [change for change, status in zip(CHANGES, statuses, strict=True) if status != "SUCCESSFUL"] == []
    assert sorted(calls) == [(number, "none") for number in range(len(CHANGES))]
    assert list(Task.objects.order_by("id").values(*OF_THE_CALL)) == columns


@pytest.mark.parametrize("options", [{"unique": True}, {"lock": "order:{order}"}, {"rate": Rate(1, per=3600)}], ids=str)
def test_a_key_that_is_added_does_not_know_waiting_calls(options):
    deploy(one).enqueue(7)
    deploy(one, **options).enqueue(7)
    assert run() == ["SUCCESSFUL"] * 2


def test_calls_of_a_queue_or_backend_that_is_removed_from_the_settings_run(settings):
    deploy(one, queue_name="gone").enqueue(7)
    deploy(one, backend="default").enqueue(8)
    Task.objects.filter(args=[8]).update(backend="gone")
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["default"]}}
    deploy(one)
    assert run() == ["SUCCESSFUL"] * 2
    assert sorted(calls) == [(7, "none"), (8, "none")]


# Schedules


@pytest.fixture
def version(worker_process, tmp_path):
    """Start a worker whose code has a schedule every so many seconds."""

    def start(seconds):
        app = tmp_path / str(seconds) / "deployed"
        app.mkdir(parents=True, exist_ok=True)
        (app / "__init__.py").touch()
        (app / "settings.py").write_text(
            "from tests.settings import *\nfrom tests.settings import INSTALLED_APPS\n"
            "INSTALLED_APPS = [*INSTALLED_APPS, 'deployed']\n"
        )
        (app / "tasks.py").write_text(
            f"from django_pglock import task\n@task(every={seconds}, keep_result=0)\ndef tick(): ...\n"
        )
        environment = {"PYTHONPATH": str(app.parent), "DJANGO_SETTINGS_MODULE": "deployed.settings"}
        return worker_process("--threads", "1", **environment)

    return start


def expression():
    return Schedule.objects.filter(pk="deployed.tasks.tick").values_list("expression", flat=True).first()


@pytest.mark.acceptance
def test_the_newest_schedule_applies_whatever_starts_stops_or_is_deleted(version, eventually):
    version(3600)
    eventually(lambda: expression() == "every 3600 s")
    new = version(0.2)
    eventually(lambda: expression() == "every 0.2 s", why="the newer code was not followed")
    again = version(3600)
    again.wait_for("every 0.2 s' in newer code")
    last = Schedule.objects.get(pk="deployed.tasks.tick").last_at
    eventually(lambda: Schedule.objects.filter(last_at__gt=last).exists(), why="the ticks of the newer code stopped")
    Schedule.objects.all().delete()
    eventually(expression, why="a deleted row was not registered again")
    eventually(lambda: expression() == "every 0.2 s" or "in newer code" in new.output)
    new.send(signal.SIGTERM)
    new.wait()
    eventually(lambda: expression() == "every 3600 s", why="the code was rolled back, and its schedule was not")
    assert again.output.count("in newer code") <= 2, "it is said once for each version of the row"


def tell(keeper, *, every):
    """Let a process whose code has this schedule look at the rows."""
    deploy(one_tick, every=every)
    keeper.keep()
    return Schedule.objects.get().expression


def one_tick(order=0): ...


#: The row of a worker whose code has the schedule every 5 seconds.
LATER = {
    "name": "w",
    "hostname": "h",
    "pid": 1,
    "queues": [],
    "threads": 1,
    "task_paths": [f"{__name__}.send", f"{__name__}.send every 5 s"],
}


@pytest.fixture
def clock(monkeypatch):
    """The time of this process, for the schedules."""
    now = {"now": 1000.0}
    monkeypatch.setattr(schedules, "time", SimpleNamespace(monotonic=lambda: now["now"]))
    return now


@pytest.mark.parametrize(
    ("about", "is_older"),
    [
        ({}, True),
        ({"is_stopping": True}, False),
        ({"heartbeat_at": "2020-01-01T00:00:00Z"}, False),
        ({"task_paths": [f"{__name__}.send"]}, False),
    ],
    ids=["living", "stopping", "dead", "without"],
)
def test_an_earlier_version_changes_a_schedule_only_after_the_workers_of_the_later_one(about, is_older, clock, caplog):
    old, new = ScheduleKeeper("default"), ScheduleKeeper("default")
    assert tell(old, every=60) == "every 60 s"
    assert tell(new, every=5) == "every 5 s", "it is new"
    WorkerRow.objects.create(id=uuid4(), parent=uuid4(), **{**LATER, **about})
    assert tell(old, every=60) == "every 5 s", "the later workers may be about to start again"
    clock["now"] += get_settings().HEARTBEAT_LIMIT + 1
    assert [tell(old, every=60) for _ in range(3)] == ["every 5 s" if is_older else "every 60 s"] * 3
    assert caplog.text.count("in newer code that other workers run") == is_older


def test_a_later_version_that_starts_again_in_time_is_kept(clock):
    """Its only worker is restarted, while workers of the earlier version still run."""
    old, new = ScheduleKeeper("default"), ScheduleKeeper("default")
    tell(old, every=60), tell(new, every=5)
    for _ in range(3):
        WorkerRow.objects.all().delete()
        assert tell(old, every=60) == "every 5 s"
        WorkerRow.objects.create(**LATER, id=uuid4(), parent=uuid4())
        clock["now"] += get_settings().HEARTBEAT_LIMIT + 1
        assert tell(old, every=60) == "every 5 s"


def test_a_disabled_schedule_stays_disabled_when_the_code_changes_it():
    tell(ScheduleKeeper("default"), every=60)
    Schedule.objects.disable()
    assert tell(ScheduleKeeper("default"), every=5) == "every 5 s"
    assert not Schedule.objects.get().is_enabled


def test_a_schedule_that_is_removed_keeps_its_row_and_enqueues_nothing():
    """Another deployment, or the next one, may have it. The overview says that no worker enqueues it."""
    tell(ScheduleKeeper("default"), every=60)
    Schedule.objects.update(next_at=Now())
    deploy(one_tick)
    assert ScheduleKeeper("default").keep() == ([], None)
    assert not Task.objects.exists()
    assert Schedule.objects.get().expression == "every 60 s"


def test_a_schedule_that_a_person_has_deleted_is_registered_again_with_its_next_tick():
    keeper = ScheduleKeeper("default")
    tell(keeper, every=60)
    Schedule.objects.all().delete()
    assert keeper.keep().tasks == []
    assert Schedule.objects.filter(next_at__gt=Now()).exists()
