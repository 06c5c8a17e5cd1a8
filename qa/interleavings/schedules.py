"""Schedules: a tick becomes one task, whatever reads, changes or removes the schedule at that moment."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

from django.db.models import DateTimeField
from django.db.models.functions import Now, Trunc

from django_pglock import task
from django_pglock.models import Schedule
from qa.interleavings.judge import Judge, law
from qa.interleavings.verbs import Results, in_a_transaction, verb
from qa.interleavings.worlds import World
from tests.db.store.schedules import enqueue_due, register
from tests.sample import scheduled

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
#: Verbs after which a tick may be past without a task.
PASS_TICKS = {"enable", "remove", "enable_in_a_transaction", "remove_in_a_transaction"}


def schedules(world: World) -> None:
    """One schedule is due, one whose function is unique is due, one is due and disabled, and one has changed."""
    nightly = task(every=HOUR)(scheduled.nightly)
    unique = task(every=HOUR, unique=True)(scheduled.hourly)
    disabled = task(every=HOUR)(scheduled.weekly)
    changed = task(every=HOUR)(scheduled.monthly)
    register()
    Schedule.objects.update(next_at=Trunc(Now() - MINUTE, "second", output_field=DateTimeField()))
    Schedule.objects.filter(pk=disabled.module_path).update(is_enabled=False)
    Schedule.objects.filter(pk=changed.module_path).update(expression="every 60 s")
    world.facts = {"schedules": {row.pk: row for row in Schedule.objects.all()}, "always": nightly.module_path}
    world.facts["unique"] = unique.module_path


@verb("schedules", is_workers=True)
def tick(world: World, results: Results) -> None:
    enqueue_due()


@verb("schedules", is_workers=True)
def register_again(world: World, results: Results) -> None:
    register()


@verb("schedules")
def enable(world: World, results: Results) -> None:
    Schedule.objects.all().enable()


@verb("schedules")
def disable(world: World, results: Results) -> None:
    Schedule.objects.all().disable()


@verb("schedules")
def remove(world: World, results: Results) -> None:
    Schedule.objects.all().delete()


@verb("schedules")
def run_schedules_now(world: World, results: Results) -> None:
    results.enqueued += Schedule.objects.all().run_now()


for name in ("enable", "disable", "remove", "run_schedules_now"):
    in_a_transaction(name)


@law("schedules")
def each_tick_is_one_task(judge: Judge) -> None:
    before, now = judge.world.facts["schedules"], {row.pk: row for row in Schedule.objects.all()}
    by_schedule = [each for each in judge.now.values() if "schedule" in each.meta]
    ticks = {(each.task_path, datetime.fromisoformat(each.meta["schedule"])): each.pk for each in by_schedule}
    assert len(by_schedule) == len(ticks), "a tick was enqueued twice"
    verbs = {each.name for each in judge.verbs}
    for path, date in ticks:
        assert date == before[path].next_at, f"{path} was not due at {date}"
        assert before[path].is_enabled or verbs & PASS_TICKS, f"{path} is disabled"
        assert path not in now or now[path].next_at > date, f"the tick of {path} would be enqueued again"
        if path in now and now[path].last_at:
            assert (now[path].last_at, now[path].last_task) == (date, ticks[path, date])
    always = judge.world.facts["always"]
    if not verbs & PASS_TICKS and now[always].next_at != before[always].next_at:
        assert (always, before[always].next_at) in ticks, "a tick has passed without a task"


@law("schedules")
def what_was_run_now_is_one_task_each(judge: Judge) -> None:
    """A unique function that waits already is not enqueued again: its task is the answer, perhaps that of a tick."""
    by_hand = {each.pk for each in judge.now.values() if "schedule" not in each.meta}
    told = set(judge.results.enqueued)
    assert judge.has_died or by_hand <= told, "a task was enqueued, and nobody was told"
    ticks = {judge.now[pk].task_path for pk in told - by_hand}
    assert ticks <= {judge.world.facts["unique"]}, "the task of a tick is not one that was enqueued by hand"
    assert max(Counter(judge.now[pk].task_path for pk in by_hand).values(), default=0) <= len(judge.verbs)
