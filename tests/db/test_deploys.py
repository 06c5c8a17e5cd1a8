"""Old code meets new rows, and new code meets old rows. What cannot be right fails aloud and keeps the data."""

from __future__ import annotations

import signal
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock import task
from django_pglock.models import AdvisoryLock, Attempt, Schedule, Task
from django_pglock.models import Worker as WorkerRow
from django_pglock.store.schedules import ScheduleKeeper
from django_pglock.tasks import registry
from django_pglock.worker import Worker

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

calls = []


@pytest.fixture(autouse=True)
def _no_calls():
    calls.clear()


def deploy(function, **options):
    """Make a function the present version of the task function ``send`` of this module."""
    function.__module__, function.__qualname__ = __name__, "send"
    registry._definitions.pop(f"{__name__}.send", None)
    return task(**options)(function)


def run():
    """Run a worker until no task is left to run. Returns the status of each task."""
    Worker(threads=1, drain=True).run()
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
        calls.append([each.name for each in AdvisoryLock.objects.all() if "order" in each.name])

    deploy(look).enqueue(7)
    deploy(look, lock="order:{order}", advisory=True).enqueue(7)
    assert run() == ["SUCCESSFUL"] * 2
    assert calls == [["order:7"]] * 2


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
def test_an_earlier_version_changes_a_schedule_only_after_the_workers_of_the_later_one(about, is_older, caplog):
    old, new = ScheduleKeeper("default"), ScheduleKeeper("default")
    assert tell(old, every=60) == "every 60 s"
    assert tell(new, every=5) == "every 5 s", "it is new"
    known = [f"{__name__}.send", f"{__name__}.send every 5 s"]
    row = {"name": "w", "hostname": "h", "pid": 1, "queues": [], "threads": 1, "task_paths": known}
    WorkerRow.objects.create(id=uuid4(), **{**row, **about})
    assert [tell(old, every=60) for _ in range(3)] == ["every 5 s" if is_older else "every 60 s"] * 3
    assert caplog.text.count("in newer code that other workers run") == is_older


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
