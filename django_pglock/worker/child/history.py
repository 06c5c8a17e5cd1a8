"""Counts settled attempts for the table of numbers, which store/numbers.py describes."""

from __future__ import annotations

import random
import time
from operator import attrgetter
from typing import Any

from django.db import Error as DatabaseFailure

from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.numbers import MINUTE, Counts, add_numbers, bucket_of, clock
from django_pglock.store.outcome import (
    Abandoned,
    Cancelled,
    Failed,
    GivenBack,
    Interrupted,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.tasks.claim import Claim
from django_pglock.worker.child.in_flight import EndedClaim

logger = get_logger(WORKER)

#: The name of each outcome in the table of numbers.
NAMES: dict[type[Any], str] = {
    Succeeded: "succeeded",
    Failed: "failed",
    Retried: "retried",
    Cancelled: "cancelled",
    Snoozed: "snoozed",
    Interrupted: "lost",
    Abandoned: "lost",
}
# Functions written in C, because they are called for thousands of ended claims.
CLAIM, OUTCOME = attrgetter("claim"), attrgetter("outcome")
QUEUE, PATH = attrgetter("queue"), attrgetter("task_path")
#: The approximate number of attempts that are measured in a batch of attempts with the same queue, function and
#: outcome. It is a sample: the other attempts are counted with the same times. To measure each of a thousand tasks that
#: take some microseconds would take 5 % of their time.
MEASURED = 8
#: The number of minutes, in addition to the present one, whose counts are kept while the database refuses them.
MOST_MINUTES = 10


class History:
    """The counts of the settler since the last write, by minute.

    An error here must not stop the settler. If a write fails, the worker tries again a minute later, and drops the
    counts after ten minutes.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        # By minute, queue and function.
        self._pending: dict[tuple[int, str, str], Counts] = {}
        # The database's clock minus time.monotonic().
        self._clock = time.time() - time.monotonic()
        # Random, so that workers that have started together do not write together.
        self._write_at = time.monotonic() + random.uniform(MINUTE / 2, MINUTE)  # noqa: S311

    def set_clock(self) -> None:
        """Read the database's clock, by which minutes are counted. Call it in each new session."""
        self._clock = clock(self.using) - time.monotonic()

    def count(self, ended_claims: list[EndedClaim]) -> None:
        """Count claims that have just been settled."""
        minute = int((time.monotonic() + self._clock) // MINUTE * MINUTE)
        for (queue, path, kind), alike in _alike(ended_claims).items():
            # A claim that was given back is not an attempt.
            if kind is not GivenBack:
                _count(self._pending.setdefault((minute, queue, path), Counts()), NAMES[kind], alike)

    def due_in(self) -> float | None:
        """Return the seconds until the next write; None: there are no counts."""
        return max(0.0, self._write_at - time.monotonic()) if self._pending else None

    def write(self) -> None:
        """Write the counts since the last write."""
        self._write_at = time.monotonic() + MINUTE
        if not self._pending:
            return
        try:
            self._clock = add_numbers(self.using, self._pending) - time.monotonic()
        except DatabaseFailure:
            logger.warning("The numbers of tasks cannot be written. The worker tries again in a minute.", exc_info=True)
            oldest = max(minute for minute, *_ in self._pending) - MOST_MINUTES * MINUTE
            self._pending = {key: counts for key, counts in self._pending.items() if key[0] > oldest}
        else:
            self._pending.clear()


def waited(claim: Claim) -> float | None:
    """Return for how many seconds the task was ready until this claim; None: not known.

    A retry by a person sets ``run_after``. If the upkeep has made a task ready again, the date is not stored.
    """
    started_at = claim.started_at
    if claim.attempt > 1 and started_at is not None and claim.due_at < float(started_at):
        return None
    return claim.waited


def _alike(ended_claims: list[EndedClaim]) -> dict[tuple[str, str, type[Any]], list[EndedClaim]]:
    """Return the ended claims by queue, function and outcome. In most batches these are the same for all."""
    claims = list(map(CLAIM, ended_claims))
    parts = {*map(QUEUE, claims)}, {*map(PATH, claims)}, {*map(type, map(OUTCOME, ended_claims))}
    if {*map(len, parts)} == {1}:
        return {(parts[0].pop(), parts[1].pop(), parts[2].pop()): ended_claims}
    alike: dict[tuple[str, str, type[Any]], list[EndedClaim]] = {}
    for ended in ended_claims:
        alike.setdefault((ended.claim.queue, ended.claim.task_path, type(ended.outcome)), []).append(ended)
    return alike


def _count(counts: Counts, name: str, ended_claims: list[EndedClaim]) -> None:
    number = len(ended_claims)
    setattr(counts, name, getattr(counts, name) + number)
    step = max(1, number // MEASURED)
    measured = ended_claims[::step]
    # The first one also counts for the remainder.
    _measure(counts, measured[:1], number - step * (len(measured) - 1))
    _measure(counts, measured[1:], step)


def _measure(counts: Counts, ended_claims: list[EndedClaim], weight: int) -> None:
    """Add the times of these attempts, each ``weight`` times."""
    for ended in ended_claims:
        if ended.seconds is not None:
            counts.run[bucket_of(ended.seconds)] += weight
            counts.run_seconds += ended.seconds * weight
            wait = waited(ended.claim)
            if wait is not None:
                counts.wait[bucket_of(wait)] += weight
                counts.wait_seconds += wait * weight
