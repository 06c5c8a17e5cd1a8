"""What both walks are made of: outcomes, a simulated worker's verbs, and how far to walk."""

from __future__ import annotations

import os
from uuid import UUID

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from django_pglock.models import Attempt, Queue, RateLimit, Task, Waiter, Worker
from django_pglock.store.claim import claim_statement, claims_of
from django_pglock.store.liveness import beat
from django_pglock.store.outcome import (
    Abandoned,
    Cancelled,
    Failed,
    Failure,
    GivenBack,
    Interrupted,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.tasks.claim import Claim

FAILURE = Failure("builtins.ValueError", "Traceback …")
OUTCOMES = st.sampled_from(
    [
        *(Succeeded(), Succeeded("1"), Failed(FAILURE), Retried(FAILURE, 0), Retried(FAILURE, 60)),
        *(
            Interrupted(FAILURE, 0),
            Interrupted(FAILURE, 60),
            GivenBack(),
            Abandoned(60),
            Snoozed(0),
            Snoozed(60),
            Cancelled(FAILURE),
        ),
    ]
)
#: Examples of a long walk, which takes a hundred steps each; without, the walks are short.
LONG = int(os.environ.get("PGLOCK_WALKS", "0"))


def walk(machine: type, *, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=LONG or examples,
            stateful_step_count=100 if LONG else steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # To shrink a walk takes minutes.
            phases=set(Phase) - {Phase.shrink},
        ),
    )


def clear() -> None:
    for model in (Attempt, Waiter, Task, Worker, Queue, RateLimit):
        model.objects.all().delete()


def beat_of(worker: UUID) -> None:
    beat("default", worker, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)


def claim(worker: UUID, limit: int, paths: list[str]) -> list[Claim]:
    statement = claim_statement("default", worker=worker, paths=paths)
    return claims_of(statement.execute(limit, "default"), worker)
