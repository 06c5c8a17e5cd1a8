"""Families: tasks that gather children, whatever settles, cancels, retries or prunes them at that moment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from django_pglock.errors import ClaimLost, TaskCancelled
from django_pglock.models import Step, Task
from django_pglock.store.admit import admit
from django_pglock.store.children import write_gather
from django_pglock.store.outcome import Snoozed
from django_pglock.store.release import release
from django_pglock.store.settle import settle
from django_pglock.store.steps import RecordedSteps
from django_pglock.tasks import registry
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.states import FINISHED
from django_pglock.tasks.step_records import Suspension, TaskCall
from qa.interleavings.judge import Judge, law
from qa.interleavings.verbs import Results, in_a_transaction, verb
from qa.interleavings.worlds import DEAD, FAILED, LIVING, World
from tests.sample import step_tasks as sample

CHILDREN = 3


def family(world: World) -> None:
    """Three tasks with keys: one waits for its children, those of the second have ended, and the third has none yet."""
    waiting, ended, world.facts["begins"] = (world.running(sample.family_of_order, number) for number in range(3))
    suspend(waiting, [sample.child.call_of(number) for number in range(CHILDREN)])
    suspend(ended, [sample.child.call_of(9)])
    for each in (waiting, ended):
        world.claims.remove(each)
    running, dead, _ready = Step.objects.get(task=waiting.id).result["children"]
    world.claimed(running)
    world.claimed(dead, worker=DEAD)
    last = world.claimed(Step.objects.get(task=ended.id).result["children"][0])
    world.claims.remove(last)
    settle("default", [(last, FAILED)], LIVING)
    release("default", [last.id])
    world.facts["continues"] = world.claimed(ended.id)
    for number in range(3):
        sample.child_of_order.enqueue(number)


def suspend(claim: Claim, calls: Sequence[TaskCall[object]]) -> bool:
    """Do what a worker does with a function that gathers. Return whether its task is suspended."""
    try:
        RecordedSteps("default", claim, registry.find(claim.task_path)).gather("children", calls)
    except Suspension as how:
        write_gather("default", claim, how)
        return True
    return False


def suspending(claim: Claim, calls: Sequence[TaskCall[object]], results: Results) -> None:
    with suppress(ClaimLost, TaskCancelled):
        if suspend(claim, calls):
            results.accepted.append((claim, Snoozed(0)))
            admit("default", [claim.lock_key])


@verb("family", is_workers=True)
def gather_children(world: World, results: Results) -> None:
    suspending(world.facts["begins"], [sample.child.call_of(number) for number in range(CHILDREN)], results)


@verb("family", is_workers=True)
def see_the_end_of_children(world: World, results: Results) -> None:
    suspending(world.facts["continues"], [], results)


@verb("family")
def cancel_parents(world: World, results: Results) -> None:
    Task.objects.filter(task_path=sample.family_of_order.module_path).cancel()


@verb("family", retries=True)
def retry_children(world: World, results: Results) -> None:
    Task.objects.filter(task_path=sample.child.module_path).retry()


for name in ("cancel_parents", "retry_children"):
    in_a_transaction(name)


@law("family")
def children_are_enqueued_with_their_parent_or_not_at_all(judge: Judge) -> None:
    new = {pk for pk in judge.now.keys() - judge.before.keys() if judge.now[pk].task_path == sample.child.module_path}
    recorded = [each for each in _records() if each.task_id == judge.world.facts["begins"].id]
    assert new == set(*(each.result["children"] for each in recorded)) - judge.pruned


@law("family")
def a_gather_ends_when_its_children_have(judge: Judge) -> None:
    for each in _records():
        ends = each.result.get("ends")
        assert (ends is None) is (each.finished_at is None)
        assert {status for status, *_others in (ends or {}).values()} <= FINISHED


def _records() -> list[Step]:
    return list(Step.objects.filter(kind="CHILDREN"))
