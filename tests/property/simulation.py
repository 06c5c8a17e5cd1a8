"""The verbs of a simulated worker, and how many examples Hypothesis tries."""

from __future__ import annotations

import os
from uuid import UUID

from django_pglock.store.claim import claim_statement, claims_of
from django_pglock.tasks.claim import Claim
from tests.db.store.workers import beat

#: How many examples of a single call are tried, instead of few.
LONG = int(os.environ.get("PGLOCK_WALKS", "0"))


def beat_of(worker: UUID) -> None:
    beat("default", worker, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)


def claim(worker: UUID, limit: int, paths: list[str]) -> list[Claim]:
    statement = claim_statement("default", worker=worker, paths=paths)
    return claims_of(statement.execute(limit, "default"), worker)
