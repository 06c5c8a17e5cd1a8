"""Counting attempts that are settled, for the history and for metrics. store/history.py says what is counted."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter, sub
from typing import Any

from django.db import Error as DatabaseFailure

from django_pglock.store.histogram import bucket_of
from django_pglock.store.history import MINUTE, Counts, add_history, clock
from django_pglock.store.outcome import (
    Abandoned,
    Cancelled,
    Failed,
    Interrupted,
    Released,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.tasks.claim import Claim
from django_pglock.worker.ended_claim import EndedClaim

logger = logging.getLogger("django_pglock.worker")

#: The name of each outcome in the history.
NAMES: dict[type[Any], str] = {
    Succeeded: "succeeded",
    Failed: "failed",
    Retried: "retried",
    Cancelled: "cancelled",
    Snoozed: "snoozed",
    Interrupted: "lost",
    Abandoned: "lost",
}
# Read of thousands of ended claims, so by functions in C.
CLAIM, OUTCOME, SECONDS = attrgetter("claim"), attrgetter("outcome"), attrgetter("seconds")
QUEUE, PATH, NUMBER = attrgetter("queue"), attrgetter("task_path"), attrgetter("attempt")
RUN_AFTER, ENQUEUED_AT, CLAIMED_AT = attrgetter("run_after"), attrgetter("enqueued_at"), attrgetter("last_attempted_at")
#: Minutes whose counts are kept while the database refuses them, beside the present one.
MOST_MINUTES = 10


class History:
    """What the settler has counted: since the last write, by minute; and since the start of the process.

    The settler counts and writes, in its own thread and session; the metrics read. Nothing here may keep outcomes from
    being settled: if a write fails, the worker tries again a minute later, and drops the counts after ten minutes.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._pending: dict[int, dict[tuple[str, str], Counts]] = {}
        self._totals: dict[tuple[str, str], Counts] = {}
        # What is pending moves to the totals at once for a reader.
        self._moving = threading.Lock()
        # The database's clock minus time.monotonic().
        self._clock = time.time() - time.monotonic()
        # Workers that have started together do not write together.
        self._write_at = time.monotonic() + random.uniform(MINUTE / 2, MINUTE)  # noqa: S311
        self._is_failing = False

    def set_clock(self) -> None:
        """Read the database's clock, which the minutes are of. Call it with each new session."""
        self._clock = clock(self.using) - time.monotonic()

    def count(self, ended_claims: list[EndedClaim]) -> None:
        """Count claims that were settled just now."""
        minute = int((time.monotonic() + self._clock) // MINUTE * MINUTE)
        for (queue, path, kind), alike in _alike(ended_claims).items():
            # A claim that was given back before it began is no attempt.
            if kind is not Released:
                present = self._pending.setdefault(minute, {})
                _count(present.setdefault((queue, path), Counts()), NAMES[kind], alike)

    def due_in(self) -> float | None:
        """Return in how many seconds there is something to write; None: there is nothing."""
        return max(0.0, self._write_at - time.monotonic()) if self._pending else None

    def write(self) -> None:
        """Write what was counted since the last write."""
        self._write_at = time.monotonic() + MINUTE
        if not self._pending:
            return
        pending = {(minute, *key): counts for minute, by_key in self._pending.items() for key, counts in by_key.items()}
        try:
            self._clock = add_history(self.using, pending) - time.monotonic()
        except DatabaseFailure:
            if not self._is_failing:
                logger.warning("The history of tasks cannot be written. The worker keeps trying.", exc_info=True)
            self._is_failing = True
            self._forget(sorted(self._pending)[:-MOST_MINUTES])
        else:
            if self._is_failing:
                logger.warning("The history of tasks is written again.")
            self._is_failing = False
            self._forget(list(self._pending))

    def totals(self) -> dict[tuple[str, str], Counts]:
        """Return what was counted since the start of the process, by queue and function. For other threads."""
        with self._moving:
            parts = [self._totals, *self._pending.values()]
            totals: dict[tuple[str, str], Counts] = {}
            for part in parts:
                _add(totals, part.copy())
        return totals

    def _forget(self, minutes: Iterable[int]) -> None:
        with self._moving:
            for minute in minutes:
                _add(self._totals, self._pending.pop(minute))


def waited(claim: Claim) -> float | None:
    """Return for how many seconds the task was ready until this claim; None: nobody knows when it became ready.

    Nothing says when a person or the upkeep has made a task ready again.
    """
    since = claim.enqueued_at
    if claim.run_after is not None and claim.run_after > since:
        since = claim.run_after
    if claim.attempt > 1 and since < claim.started_at < claim.last_attempted_at:
        return None
    return max(0.0, claim.last_attempted_at - since)


def _alike(ended_claims: list[EndedClaim]) -> dict[tuple[str, str, type[Any]], list[EndedClaim]]:
    """Return the ended claims by queue, function and outcome. Most batches are alike."""
    claims = list(map(CLAIM, ended_claims))
    parts = {*map(QUEUE, claims)}, {*map(PATH, claims)}, {*map(type, map(OUTCOME, ended_claims))}
    if {*map(len, parts)} == {1}:
        return {(parts[0].pop(), parts[1].pop(), parts[2].pop()): ended_claims}
    alike: dict[tuple[str, str, type[Any]], list[EndedClaim]] = {}
    for ended in ended_claims:
        alike.setdefault((ended.claim.queue, ended.claim.task_path, type(ended.outcome)), []).append(ended)
    return alike


def _count(counts: Counts, name: str, ended_claims: list[EndedClaim]) -> None:
    setattr(counts, name, getattr(counts, name) + len(ended_claims))
    runs = list(map(SECONDS, ended_claims))
    if None in runs:
        # Functions that were not called. Nobody has waited for them to the end, either.
        ended_claims = [ended for ended in ended_claims if ended.seconds is not None]
        runs = list(map(SECONDS, ended_claims))
    counts.run_seconds += _sort_in(counts.run, runs)
    claims = list(map(CLAIM, ended_claims))
    if {*map(NUMBER, claims)} == {1} and {*map(RUN_AFTER, claims)} == {None}:
        waits = list(map(sub, map(CLAIMED_AT, claims), map(ENQUEUED_AT, claims)))
    else:
        waits = [wait for wait in map(waited, claims) if wait is not None]
    counts.wait_seconds += _sort_in(counts.wait, waits)


def _sort_in(buckets: list[int], durations: list[float]) -> float:
    """Count durations in their buckets, and return their sum. Those of a batch often have one bucket."""
    if not durations:
        return 0.0
    first, last = bucket_of(min(durations)), bucket_of(max(durations))
    if first == last:
        buckets[first] += len(durations)
    else:
        for bucket, number in Counter(map(bucket_of, durations)).items():
            buckets[bucket] += number
    return sum(durations)


def _add(to: dict[tuple[str, str], Counts], part: dict[tuple[str, str], Counts]) -> None:
    for key, counts in part.items():
        to.setdefault(key, Counts()).add(counts)
