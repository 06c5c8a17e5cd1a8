"""Tasks with steps: what records a step, suspends a task, or emits an event, whatever moves the task at that moment."""

from __future__ import annotations

import json
from contextlib import suppress

from django.db import transaction

from django_pglock import emit
from django_pglock.errors import EventTimeout
from django_pglock.models import Event, Queue, Step, Task
from django_pglock.store.operate import run_again_from
from django_pglock.store.outcome import Snoozed
from django_pglock.store.release import promote, release
from django_pglock.store.settle import settle
from django_pglock.store.steps import RecordedSteps, note_causes, write_suspensions
from django_pglock.tasks import registry
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.step_records import HandedBack, StepEnded, Suspension
from qa.interleavings.judge import Judge, law
from qa.interleavings.verbs import Results, in_a_transaction, verb
from qa.interleavings.workers import settling
from qa.interleavings.worlds import DEAD, FAILED, LIVING, World
from tests.sample import step_tasks as sample
from tests.sample import tasks

#: The orders, each of which waits for an event of its own, and the payload of all events.
ORDERS, PAYLOAD = range(7), 7
#: The timeout of a wait that is over when it begins.
SHORT, LONG = 0.001, 3600.0


def steps(world: World) -> None:
    """Tasks that wait for an event, sleep, are over time, begin, or have failed by a step. Others wait for keys."""
    waits, sleeps, late, dead, begins, interrupted, failed = (
        world.running(sample.order_of_steps, number, worker=DEAD if number == 3 else LIVING) for number in ORDERS
    )
    for each in (waits, late, dead, interrupted, failed):
        steps_of(each).step("charge", int)
    suspend(world, waits, LONG)
    suspend(world, late, SHORT)
    suspend(world, sleeps, SHORT, is_sleep=True)
    with transaction.atomic():
        promote("default")
    world.claimed(late.id)
    Task.objects.filter(pk__in=[begins.id, interrupted.id]).update(retries=1)
    world.facts["records_more"] = interrupted
    dependant = tasks.nothing.using(after=[failed.id]).enqueue()
    fail_by_step(world, failed)
    assert Task.objects.get(pk=dependant.id).status == "CANCELLED"
    for number in ORDERS[:-1]:
        sample.order_of_steps.enqueue(number)
    world.facts["recorded"] = {(each.task_id, each.name, each.number) for each in _records()}


def steps_of(claim: Claim) -> RecordedSteps:
    """Return the steps of the attempt, which has recorded some before."""
    mine = RecordedSteps("default", claim, registry.find(claim.task_path))
    mine._read()
    return mine


def suspension_of(claim: Claim, timeout: float, *, is_sleep: bool = False) -> Suspension | None:
    """Return how a function leaves that waits; None if what it waits for is there."""
    try:
        if is_sleep:
            steps_of(claim).sleep("rest", timeout)
        else:
            steps_of(claim).wait_for(f"packed:{json.loads(claim.args)[0]}", timeout, "packed")
    except Suspension as how:
        return how
    except EventTimeout:
        return None
    return None


def suspend(world: World, claim: Claim, timeout: float, *, is_sleep: bool = False) -> None:
    how = suspension_of(claim, timeout, is_sleep=is_sleep)
    assert how is not None
    with transaction.atomic():
        settle("default", [(claim, Snoozed(how.seconds, suspension=how))], LIVING)
        write_suspensions("default", [(claim, how)])
    world.claims.remove(claim)


def fail_by_step(world: World, claim: Claim) -> None:
    steps_of(claim).record("pack", None, {"path": FAILED.failure.exception_path, "message": ""})
    with transaction.atomic():
        settle("default", [(claim, FAILED)], LIVING)
        note_causes("default", [(claim.id, "pack")])
    world.claims.remove(claim)
    release("default", [claim.id])


@verb("steps", is_workers=True)
def record_steps(world: World, results: Results) -> None:
    """Also in a transaction of their own, and how far a loop is. An attempt that suspends its task records nothing."""
    record(world.facts["records_more"])


@verb("steps", is_workers=True)
def record_steps_too_late(world: World, results: Results) -> None:
    """The worker that counts as dead continues."""
    for each in world.zombies:
        record(each)


def record(claim: Claim) -> None:
    with suppress(StepEnded, HandedBack):
        mine = steps_of(claim)
        mine.step("weigh", int)
        mine.atomic_step("book", int)
        for rows in mine.chunks("rows", Queue.objects.all(), 10):
            with rows:
                pass


def suspending(world: World) -> list[Claim]:
    return [each for each in world.claims if each is not world.facts["records_more"]]


@verb("steps", is_workers=True)
def suspend_until_events(world: World, results: Results) -> None:
    """Or until the end of a wait that is over."""
    waits = [(each, suspension_of(each, SHORT if each.attempt > 1 else LONG)) for each in suspending(world)]
    settling(world, results, [(each, Snoozed(how.seconds, suspension=how)) for each, how in waits if how])


@verb("steps", is_workers=True)
def suspend_for_a_rest(world: World, results: Results) -> None:
    waits = [(each, suspension_of(each, LONG, is_sleep=True)) for each in suspending(world)]
    settling(world, results, [(each, Snoozed(how.seconds, suspension=how)) for each, how in waits if how])


@verb("steps")
def emit_events(world: World, results: Results) -> None:
    for number in ORDERS:
        emit(f"packed:{number}", PAYLOAD)


@verb("steps", retries=True)
def run_again(world: World, results: Results) -> None:
    """From the first step."""
    for each in world.before:
        run_again_from("default", each, "charge")


for name in ("emit_events", "run_again"):
    in_a_transaction(name)


@law("steps")
def an_event_and_its_wait_meet(judge: Judge) -> None:
    """A task that waits for what is there would wait forever. The upkeep finds what a crash has left."""
    there = set(Event.objects.values_list("name", flat=True))
    for each in _records().filter(event__in=there, finished_at=None):
        task = judge.now[each.task_id]
        is_waiting = task.status == "SCHEDULED" and task.attempts == each.attempt
        assert judge.is_owed or not is_waiting, f"{task} waits for {each.event}, which is there"


@law("steps")
def of_an_event_and_the_end_of_its_wait_one_is_recorded(judge: Judge) -> None:
    for each in _records().filter(kind="EVENT"):
        end = (each.result, each.failure)
        assert end in ((PAYLOAD, None), (None, {}) if each.finished_at else (None, None)), f"{each} has ended by {end}"


@law("steps")
def what_is_recorded_stays(judge: Judge) -> None:
    if any(each.retries for each in judge.verbs):
        return
    kept = {(each.task_id, each.name, each.number) for each in _records()}
    before = {each for each in judge.world.facts["recorded"] if each[0] not in judge.pruned}
    assert before <= kept, f"no longer recorded: {before - kept}"


@law("steps")
def steps_are_numbered(judge: Judge) -> None:
    numbers = [(each.task_id, each.number) for each in _records()]
    assert len(set(numbers)) == len(numbers), f"two steps have one number: {sorted(numbers)}"


def _records():  # type: ignore[no-untyped-def]
    return Step.objects.order_by("task", "number")
