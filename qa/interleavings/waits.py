"""Waits: tasks that wait for an event, whatever emits it, suspends, settles, cancels or retries them at that moment."""

from __future__ import annotations

from django.db.models.functions import Now

from django_pglock import emit
from django_pglock.models import Event, Step, Task
from django_pglock.store.admit import admit
from django_pglock.store.outcome import Snoozed
from django_pglock.store.settle import settle
from django_pglock.store.steps import missed_events, wake_waiting
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.step_records import Kind, Suspension
from qa.interleavings.judge import Judge, law
from qa.interleavings.verbs import Results, in_a_transaction, verb
from qa.interleavings.worlds import LIVING, World
from tests.sample import step_tasks as sample

#: The event that the verbs emit, and one whose emitter has died after its commit.
EVENT, MISSED = "approved", "missed"
HOUR = 3600.0


def waits(world: World) -> None:
    """One task waits, one with a key does, one has begun to run again, and one runs for the first time."""
    waiting, keyed, again, missed = (world.running(sample.approval_of, number) for number in range(4))
    for claim in (waiting, keyed, again):
        suspend(claim, HOUR)
    suspend(missed, HOUR, event=MISSED)
    Event.objects.create(name=MISSED, payload=1, emitted_at=Now(), expires_at=Now())
    for claim in (waiting, keyed, again, missed):
        world.claims.remove(claim)
    Task.objects.filter(pk=again.id).update(status="READY", run_after=Now())
    world.facts["continues"] = world.claimed(again.id)
    world.facts["begins"] = world.running(sample.approval, None)
    sample.approval_of.enqueue(1)


def suspend(claim: Claim, seconds: float, event: str = EVENT) -> list[tuple[Claim, Snoozed]]:
    """Do what a worker does with a function that waits. Return what was accepted."""
    outcome = Snoozed(seconds, suspension=Suspension(event, Kind.EVENT, 1, seconds, event))
    accepted = [(claim, outcome)] if settle("default", [(claim, outcome)], LIVING) else []
    admit("default", [claim.lock_key for claim, _ in accepted])
    return accepted


def find_missed() -> None:
    """Do what upkeep does after an emitter has died."""
    wake_waiting("default", [event for event, is_there in missed_events("default", "") if is_there])


@verb("waits")
def emit_event(world: World, results: Results) -> None:
    emit(EVENT, 1)


in_a_transaction("emit_event")


@verb("waits", is_workers=True)
def begin_to_wait(world: World, results: Results) -> None:
    results.accepted += suspend(world.facts["begins"], HOUR)


@verb("waits", is_workers=True)
def wait_again(world: World, results: Results) -> None:
    results.accepted += suspend(world.facts["continues"], HOUR)


@verb("waits", is_workers=True)
def end_wait_by_its_timeout(world: World, results: Results) -> None:
    results.accepted += suspend(world.facts["continues"], 0.0)


@verb("waits", is_workers=True)
def find_missed_events(world: World, results: Results) -> None:
    find_missed()


@law("waits")
def no_task_sleeps_whose_event_is_there(judge: Judge) -> None:
    there = set(Event.objects.values_list("name", flat=True))
    if not any(each.name == "find_missed_events" for each in judge.verbs):
        there.discard(MISSED)
    for step in Step.objects.filter(event__in=there):
        task = judge.now.get(step.task_id)
        if task is not None and not judge.is_owed and step.attempt == task.attempts:
            assert task.status != "SCHEDULED", f"{task} sleeps, and {step.event} is there"


@law("waits")
def a_wait_ends_in_one_way(judge: Judge) -> None:
    for step in Step.objects.filter(kind="EVENT"):
        ends = [step.result == 1, step.failure == {}]
        assert ends.count(True) == (step.finished_at is not None), step
