"""The same tasks by Celery, with a worker and its broker in memory, and by the bridge: the same happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date, datetime, timezone
from decimal import Decimal
from io import StringIO
from itertools import count
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import celery
import pytest
from celery.contrib.testing.worker import start_worker
from celery.utils.time import get_exponential_backoff_interval
from django.core.management import CommandError, call_command
from django_celery_beat.models import ClockedSchedule, CrontabSchedule, IntervalSchedule, PeriodicTask, SolarSchedule

from django_pglock.contrib import celery as bridge
from django_pglock.models import Schedule, Task
from qa.foreign.sample.models import Letter

app = celery.Celery("itself", broker="memory://", backend="cache+memory://", set_as_current=False)
app.conf.worker_hijack_root_logger = False
NEVER = 60.0
numbers = count()
VALUES = [
    datetime(2026, 1, 2, tzinfo=timezone.utc),
    date(2026, 1, 2),
    Decimal("1.20"),
    UUID(int=7),
    b"x",
    (1, {"a": [2]}),
]


def api(module: Any, decorate: Callable[..., Any], base: Any) -> SimpleNamespace:
    """Return Celery's names, for the tasks of one case, which have a log in common."""
    log: list[Any] = []
    number = next(numbers)

    def task(**options: Any) -> Callable[..., Any]:
        def make(function: Any) -> Any:
            function.__qualname__ = function.__name__
            return decorate(name=f"{function.__name__} of {number}", **options)(function)

        return make

    class Hooked(base):
        abstract = True

        def before_start(self, task_id, args, kwargs):
            log.append(("before_start", list(args), kwargs))

        def on_success(self, retval, task_id, args, kwargs):
            log.append(("on_success", retval))

        def on_retry(self, exc, task_id, args, kwargs, einfo):
            log.append(("on_retry", type(exc).__name__))

        def on_failure(self, exc, task_id, args, kwargs, einfo):
            log.append(("on_failure", type(exc).__name__, str(exc)))

        def after_return(self, status, retval, task_id, args, kwargs, einfo):
            log.append(("after_return", status, type(retval).__name__))

    names = ("chain", "group", "chord", "Task")
    return SimpleNamespace(task=task, log=log, Hooked=Hooked, **{name: getattr(module, name) for name in names})


def own_limit(of):
    @of.task(bind=True, max_retries=2)
    def f(self):
        of.log.append(self.request.retries)
        raise self.retry(countdown=0)

    return f.s()


def limit_of_the_call(of):
    @of.task(bind=True)
    def f(self):
        of.log.append(self.request.retries)
        raise self.retry(countdown=0, max_retries=5, exc=KeyError("five"))

    return f.s()


def error_of_the_function(of):
    @of.task(bind=True, max_retries=1, base=of.Hooked)
    def f(self, x):
        try:
            raise ValueError("bad")
        except ValueError as error:
            raise self.retry(exc=error, countdown=0) from None

    return f.s(1)


def automatic(of):
    @of.task(autoretry_for=(ValueError,), retry_kwargs={"max_retries": 3, "countdown": 0}, base=of.Hooked)
    def f():
        raise ValueError("again")

    return f.s()


def not_automatic(of):
    @of.task(autoretry_for=(Exception,), dont_autoretry_for=(KeyError,), default_retry_delay=0, base=of.Hooked)
    def f():
        raise KeyError("never")

    return f.s()


def success_with_hooks(of):
    @of.task(base=of.Hooked)
    def f(x, y=1):
        return x + y

    return f.s(1, y=2)


def without_throw(of):
    @of.task(bind=True, max_retries=1)
    def f(self):
        of.log.append(("begins", self.request.retries))
        if not self.request.retries:
            self.retry(countdown=0, throw=False)
        of.log.append("ends")

    return f.s()


def request(of):
    @of.task(bind=True)
    def f(self, x, **more):
        request = self.request
        of.log.append([request.retries, list(request.args), request.kwargs, request.called_directly, request.is_eager])
        of.log.append(request.id is not None)

    return f.s(1, y=2)


def values(of):
    @of.task()
    def f(*args):
        of.log.append([(type(each).__name__, each) for each in args])
        return list(args)

    return f.s(*VALUES)


def adding(of):
    @of.task()
    def add(x, y):
        of.log.append((x, y))
        return x + y

    @of.task()
    def total(numbers, more=0):
        of.log.append(numbers)
        return sum(numbers) + more

    return add, total


def chain(of):
    add, _ = adding(of)
    return of.chain(add.s(1, 2), add.s(4), add.si(10, 10), add.s(1))


def chord(of):
    add, total = adding(of)
    return add.s(1, 1) | of.group(add.s(1), add.s(2)) | total.s(more=10)


def callbacks(of):
    add, _ = adding(of)

    @of.task(bind=True)
    def fails(self):
        of.log.append("fails")
        raise ValueError("no")

    @of.task()
    def old(task_id):
        of.log.append(("old", type(task_id).__name__))

    @of.task()
    def new(request, exc, traceback, name):
        of.log.append(("new", type(exc).__name__, str(exc), name))

    call = add.s(1, 1).set(link=add.s(5))
    call.link(fails.si().set(link_error=[new.s(name="given"), old.s()]))
    return call


def broken_chain(of):
    add, _ = adding(of)

    @of.task()
    def fails(*args):
        raise ValueError("no")

    return of.chain(add.s(1, 1), fails.s(), add.s(1))


CASES = [
    *(own_limit, limit_of_the_call, error_of_the_function, automatic, not_automatic, success_with_hooks, without_throw),
    *(request, values, chain, chord, callbacks, broken_chain),
]


def state_of(result: Any, *, ready: bool = True) -> tuple[str, str]:
    value = result.get(timeout=NEVER, propagate=False) if ready else result.result
    return (result.state, value if not isinstance(value, Exception) else type(value).__name__)


def by_order(log: list[Any]) -> list[str]:
    return sorted(map(repr, log))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_same_happens_with_a_worker(case, drain):
    ours, theirs = api(bridge, bridge.shared_task, bridge.Task), api(celery, app.task, app.Task)
    # Celery ends a broken chain at its broken call, and says nothing of what comes after it.
    result, other = (call if case is not broken_chain else call.parent for call in enqueued(case(ours), case(theirs)))
    drain()
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=NEVER):
        there = state_of(other)
        until = time.monotonic() + NEVER
        while by_order(theirs.log) != by_order(ours.log) and time.monotonic() < until:
            time.sleep(0.05)
    assert by_order(theirs.log) == by_order(ours.log)
    assert there == state_of(result, ready=False)


def enqueued(*calls: Any) -> Any:
    return [call.apply_async() for call in calls]


EAGER = [case for case in CASES if case not in (without_throw, values)]


@pytest.mark.parametrize("case", EAGER, ids=lambda case: case.__name__)
def test_the_same_happens_eagerly(case, settings_eager):
    ours, theirs = api(bridge, bridge.shared_task, bridge.Task), api(celery, app.task, app.Task)
    ends = []
    for call in (case(ours), case(theirs)):
        try:
            ends.append(state_of(call.apply_async()))
        except ValueError as error:
            ends.append(("raised", str(error)))
    assert ends[0] == ends[1]
    assert by_order(ours.log) == by_order(theirs.log)


@pytest.fixture
def settings_eager():
    bridge.current_app.conf.task_always_eager = app.conf.task_always_eager = True
    yield
    bridge.current_app.conf.task_always_eager = app.conf.task_always_eager = False


@pytest.mark.parametrize("case", [own_limit, automatic, success_with_hooks], ids=lambda case: case.__name__)
def test_the_same_is_raised_eagerly(case, settings_eager):
    ours, theirs = api(bridge, bridge.shared_task, bridge.Task), api(celery, app.task, app.Task)
    ends = []
    for call in (case(ours), case(theirs)):
        try:
            ends.append(call.apply(throw=True).get())
        except Exception as error:
            ends.append(type(error).__name__)
    assert ends[0] == ends[1]
    assert by_order(ours.log) == by_order(theirs.log)


@pytest.mark.parametrize("factor", [True, 1, 3, 2.7])
def test_the_same_backoff(factor):
    def f():
        pass

    f.__qualname__ = f.__name__
    task = bridge.shared_task(retry_backoff=factor, retry_jitter=False)(f)
    for retries in range(14):
        wanted = get_exponential_backoff_interval(int(max(1.0, float(factor))), retries, 600)
        assert task.countdown_of(retries) == wanted


def test_a_direct_call_is_the_same():
    for of in (api(bridge, bridge.shared_task, bridge.Task), api(celery, app.task, app.Task)):
        with pytest.raises(ValueError, match="bad"):
            error_of_the_function(of).type(1)


# The rows of beat


@bridge.shared_task
def report(kind, day=None):
    Letter.objects.create(text=kind)


@pytest.fixture
def beat(no_schedules):
    PeriodicTask.objects.all().delete()
    Schedule.objects.all().delete()

    def add(name: str, task: str = f"{__name__}.report", **values: Any) -> None:
        PeriodicTask.objects.create(name=name, task=task, args='["weekly"]', **values)

    return add


def moved() -> tuple[dict[str, str], bool]:
    """Run the command, and return what it says of each schedule, and whether it has failed."""
    out = StringIO()
    try:
        call_command("celery_schedules", stdout=out)
    except CommandError:
        return dict(line.split(": ", 1) for line in out.getvalue().splitlines()), True
    return dict(line.split(": ", 1) for line in out.getvalue().splitlines()), False


def test_rows_of_beat_become_schedules_once(beat):
    cron = CrontabSchedule.objects.create(minute="30", hour="7", day_of_week="mon-fri", timezone="Europe/Berlin")
    hourly = IntervalSchedule.objects.create(every=2, period=IntervalSchedule.HOURS)
    beat("by cron", crontab=cron, kwargs='{"day": 1}', description="for the board")
    beat("by interval", interval=hourly, enabled=False, queue="slow")
    said, has_failed = moved()
    assert not has_failed
    assert said["by cron"] == "30 7 * * mon-fri Europe/Berlin."
    assert said["by interval"] == "every 7200 s, disabled. Without queue: give it at the decorator."
    rows = Schedule.objects.order_by("name").values_list("name", "task_path", "expression", "timezone", "is_enabled")
    path = f"{__name__}.report"
    assert [*rows] == [
        ("by cron", path, "30 7 * * mon-fri", "Europe/Berlin", True),
        ("by interval", path, "every 7200 s", "", False),
    ]
    row = Schedule.objects.get(name="by cron")
    assert (row.args, row.kwargs, row.note) == (["weekly"], {"day": 1}, "for the board")
    assert not PeriodicTask.objects.filter(enabled=True).exists()
    assert moved() == (dict.fromkeys(said, "it was moved before."), False)


def test_a_moved_schedule_runs(beat, drain):
    beat("now", interval=IntervalSchedule.objects.create(every=1, period=IntervalSchedule.DAYS))
    moved()
    Letter.objects.all().delete()
    Schedule.objects.run_now()
    drain()
    assert Letter.objects.get().text == "weekly"


def test_what_runs_once_becomes_a_task(beat):
    at = datetime(2060, 1, 1, tzinfo=timezone.utc)
    beat("at a date", clocked=ClockedSchedule.objects.create(clocked_time=at), one_off=True)
    hourly = IntervalSchedule.objects.create(every=1, period=IntervalSchedule.HOURS)
    beat("next hour", interval=hourly, one_off=True)
    beat("has run", interval=hourly, one_off=True, total_run_count=1)
    moved()
    said, _ = moved()
    assert set(said.values()) == {"it runs only once, and has run or is disabled."}
    assert Task.objects.filter(run_after=at, args=["weekly"]).count() == 1
    assert Task.objects.count() == 2
    assert not Schedule.objects.exists()


def test_what_cannot_be_moved_is_named_and_stays(beat):
    hourly = IntervalSchedule.objects.create(every=1, period=IntervalSchedule.HOURS)
    beat("unknown", task="gone.task", interval=hourly)
    beat("wrong", interval=hourly, kwargs='{"nonsense": 1}')
    beat("sun", solar=SolarSchedule.objects.create(event="sunset", latitude=1, longitude=1))
    said, has_failed = moved()
    assert has_failed
    assert said["unknown"].startswith("NOT MOVED. No task is called 'gone.task'")
    assert said["sun"].startswith("NOT MOVED. There are no solar schedules here")
    assert said["wrong"].startswith("NOT MOVED.")
    assert PeriodicTask.objects.filter(enabled=True).count() == 3
    assert not Schedule.objects.exists()
