"""What workers do with tasks."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

from django.db import connections, transaction

from django_pglock.error_reading import fingerprint_of
from django_pglock.errors import ClaimLost
from django_pglock.store.admit import admit, blocked_keys
from django_pglock.store.bulk import Work, change_batch
from django_pglock.store.claim import claim_fair, claim_group
from django_pglock.store.liveness import delete_dead, deregister
from django_pglock.store.outcome import (
    Abandoned,
    Cancelled,
    GivenBack,
    Interrupted,
    Outcome,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.store.prune import prune_window
from django_pglock.store.rate import delete_unused_rates, open_rates
from django_pglock.store.release import orphaned_waiters, promote, release
from django_pglock.store.requests_to_worker import answer_stack, write_progress
from django_pglock.store.rescue import rescue
from django_pglock.store.settle import give_back, settle_and_commit
from django_pglock.store.steps import missed_events, wake_waiting
from django_pglock.tasks.claim import Claim
from django_pglock.worker.child import settler
from django_pglock.worker.child.in_flight import EndedClaim, InFlight
from qa.interleavings.judge import Judge, law
from qa.interleavings.verbs import VERBS, Results, Verb, verb
from qa.interleavings.worlds import DEAD, FAILED, LIVING, THIRD, World
from tests.property.simulation import beat_of, claim
from tests.sample import keyed_tasks as keyed
from tests.sample import step_tasks as steps
from tests.sample import tasks
from tests.sample.models import Effect

#: Of all failures in the worlds.
EXCEPTION = FAILED.failure.exception_path
FUNCTIONS = (
    *(keyed.step, keyed.call, keyed.refresh, keyed.rebuild, keyed.remind, keyed.save),
    *(keyed.digest, keyed.note, keyed.serve, keyed.trickle, tasks.nothing),
    *(steps.family_of_order, steps.child, steps.child_of_order, steps.order_of_steps),
)
PATHS = [function.module_path for function in FUNCTIONS]
GROUPED = (keyed.digest.module_path, keyed.note.module_path)


@verb(is_workers=True)
def claim_ready(world: World, results: Results) -> None:
    worker = results.worker()
    taken = claim(worker, 10, PATHS)
    results.claims += taken
    for each in taken:
        if each.task_path in GROUPED:
            results.claims += claim_group("default", each, limit=2, gather=0)


@verb("shared", is_workers=True)
def claim_in_turns(world: World, results: Results) -> None:
    results.claims += claim_fair("default", worker=results.worker(), queue="default", paths=PATHS, after="", limit=2)[0]


def settling(world: World, results: Results, outcomes: list[tuple[Claim, Outcome]]) -> None:
    """Do what the worker's settler does with these."""
    if not outcomes:
        return
    in_flight = InFlight(1)
    service = settler.Settler(in_flight, "default")
    # It keeps the session of this thread, whose statements are stopped at, instead of one of its own.
    service._connection, service.close = connections["default"], lambda: None
    for held, outcome in outcomes:
        in_flight.claims[held.id, held.attempt] = held
        in_flight.outbox.put(EndedClaim(held, outcome))
    note_accepted(service, results)
    while in_flight.claims:
        service.run_once()


def note_accepted(service: settler.Settler, results: Results) -> None:
    """Note in the results which outcomes the database accepts."""
    write, depth = service._settle, 0

    def settle_kind(ended_claims: list[EndedClaim]) -> dict[int, Any]:
        nonlocal depth
        depth += 1
        try:
            accepted = write(ended_claims)
        finally:
            depth -= 1
        if not depth:
            # It calls itself for those whose rows nobody has locked, and returns these as well.
            results.accepted += [(each.claim, each.outcome) for each in ended_claims if each.claim.id in accepted]
        return accepted

    write_plain = service._settle_plain

    def settle_plain(batch: list[EndedClaim]) -> list[int] | None:
        accepted = write_plain(batch)
        results.accepted += [
            (each.claim, each.outcome) for each in batch if accepted is None or each.claim.id in accepted
        ]
        return accepted

    service._settle = settle_kind  # type: ignore[method-assign]
    service._settle_plain = settle_plain  # type: ignore[method-assign]


OUTCOMES: dict[str, Outcome] = {
    "succeed": Succeeded(),
    "fail": FAILED,
    "fail_for_now": Retried(FAILED.failure, 0),
    "fail_until_later": Retried(FAILED.failure, 60),
    "interrupt": Interrupted(FAILED.failure, 0),
    "leave": GivenBack(),
    "abandon": Abandoned(60),
    "snooze": Snoozed(60),
    "give_up": Cancelled(FAILED.failure),
}


def settles(name: str, outcome: Outcome) -> None:
    """Add a verb that settles all claims of the living worker."""

    def call(world: World, results: Results) -> None:
        settling(world, results, [(each, outcome) for each in world.claims])

    VERBS[name] = Verb(name, call, is_workers=True)


for name, outcome in OUTCOMES.items():
    settles(name, outcome)


@verb(is_workers=True)
def settle_too_late(world: World, results: Results) -> None:
    """The worker that counts as dead continues and settles."""
    settling(world, results, [(each, Succeeded()) for each in world.zombies])


@verb()
def succeed_atomically(world: World, results: Results) -> None:
    """The transaction of the task ends with its settle. Then the settler admits other tasks."""
    for each in world.claims[:1]:
        with suppress(ClaimLost), transaction.atomic():
            Effect.objects.count()
            settle_and_commit("default", [(each, Succeeded())])
            results.accepted.append((each, Succeeded()))
        release("default", [each.id])
        admit("default", [each.lock_key])


@verb(is_workers=True)
def report_progress(world: World, results: Results) -> None:
    reporting = [copy.copy(each) for each in world.claims]
    for each in reporting:
        each.progress = "[1, 2]"
    write_progress("default", reporting)


@verb("plain", is_workers=True)
def report_stacks(world: World, results: Results) -> None:
    for each in world.claims:
        answer_stack("default", each.id, each.attempt, each.worker, "here")


@verb(is_workers=True)
def give_back_lost_answers(world: World, results: Results) -> None:
    results.taken_back |= {each.id for each in world.claims}
    give_back("default", LIVING, [], older_than=0)


@verb(is_workers=True)
def rescue_claims(world: World, results: Results) -> None:
    results.taken_back |= {each.id for each in world.zombies}
    with transaction.atomic():
        rescue("default", unbroken=math.inf)


@verb("plain", "key", "shared", "steps", is_workers=True)
def promote_due(world: World, results: Results) -> None:
    with transaction.atomic():
        promote("default")


@verb("shared", is_workers=True)
def open_buckets(world: World, results: Results) -> None:
    admit("default", open_rates("default"))


@verb("key", "concurrent", "unique", "after", "group", "family", "steps", is_workers=True)
def sweep(world: World, results: Results) -> None:
    """What upkeep does for tasks that a crash has left waiting."""
    release("default", (awaited for _, awaited in orphaned_waiters("default", 0) if awaited is not None))
    admit("default", blocked_keys("default", ""))
    wake_waiting("default", [event for event, is_there in missed_events("default", "") if is_there])


@verb("plain", "unique", "after", "family", "steps", is_workers=True, prunes=True)
def prune_a_window(world: World, results: Results) -> None:
    prune_window("default", 0, {"SUCCESSFUL": 0, "FAILED": 0, "CANCELLED": 0})


@verb("shared", is_workers=True)
def delete_buckets(world: World, results: Results) -> None:
    delete_unused_rates("default", "")


@verb("plain", is_workers=True)
def delete_workers(world: World, results: Results) -> None:
    deregister("default", THIRD)
    delete_dead("default", unbroken=math.inf)


@verb("plain", is_workers=True)
def beat(world: World, results: Results) -> None:
    """The worker that counts as dead sends a heartbeat."""
    beat_of(DEAD)


@verb("plain", "key", "unique", retries=True)
def redrive_failures(world: World, results: Results) -> None:
    """A running task retries all that has failed with one function."""
    own, path = world.claims[0], next(each.task_path for each in world.before.values() if each.status == "FAILED")
    work = Work("retry", fingerprint=fingerprint_of(path, EXCEPTION))
    before = datetime.now(timezone.utc) + timedelta(hours=1)
    with suppress(ClaimLost):
        found = change_batch("default", work, before=before, limit=10, by=own.id, attempt=own.attempt)
        results.redriven.append(found.done)


#: Verbs that also move failed tasks, or delete them.
MOVE_FAILED = ("redrive_failures", "retry", "discard", "prune", "delete_finished")


@law("plain", "key", "unique")
def a_redrive_retries_what_it_says(judge: Judge) -> None:
    names = [each.name for each in judge.verbs]
    if judge.has_died or sum(name.startswith(MOVE_FAILED) for name in names) != 1 or "redrive_failures" not in names:
        return
    failed = [pk for pk, task in judge.before.items() if task.status == "FAILED"]
    retried = [pk for pk in failed if judge.now[pk].status != "FAILED"]
    assert len(retried) == sum(judge.results.redriven), f"{retried} were retried, and the redrive has not said so"
