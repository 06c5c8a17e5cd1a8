"""What is counted of attempts: how many ended with which outcome, and histograms of how long they waited and ran. Pure.

The buckets of a histogram are fixed, so that the histograms of several workers and minutes can be added. The upper
bounds grow by a factor of the square root of 2, from one millisecond to twelve days. A duration that equals a bound
belongs to the bucket below it. The buckets of rows that are stored must never change.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

#: The upper bounds of the buckets in seconds. One more bucket is for longer durations.
BOUNDS = tuple(0.001 * 2 ** (step / 2) for step in range(61))
#: The number of buckets.
BUCKETS = len(BOUNDS) + 1
#: The bounds of one bucket differ by this factor.
FACTOR = math.sqrt(2)
#: The ways in which an attempt can end. ``lost``: its worker died, or its connection was lost, so its outcome is not
#: known.
OUTCOMES = ("succeeded", "failed", "retried", "cancelled", "snoozed", "lost")
#: The kinds of numbers about attempts: how many ended so, and how long they waited and ran.
WAITED, RAN = "waited", "ran"
ATTEMPT_KINDS = (*OUTCOMES, WAITED, RAN)


def bucket_of(seconds: float) -> int:
    """Return the bucket number of a duration. A negative one, from clocks that differ, is in the first bucket."""
    return bisect_left(BOUNDS, seconds)


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return the quantile of the counted durations for ``share``, in seconds; None if nothing was counted.

    ``counts`` are the numbers of durations by bucket. Missing buckets at the end are empty. The durations of a bucket
    are taken as evenly distributed on a logarithmic scale, so the error is a factor of 1.41 at most. In the first
    bucket, whose lower bound is zero, they are taken as evenly distributed on a linear scale.
    """
    ends = list(accumulate(counts))
    wanted = share * ends[-1] if ends else 0
    if not wanted:
        return None
    bucket = bisect_left(ends, wanted)
    within = 1 - (ends[bucket] - wanted) / counts[bucket]
    if bucket == 0:
        return BOUNDS[0] * within
    return float(BOUNDS[bucket - 1] * FACTOR**within)


@dataclass(slots=True)
class Counts:
    """How many attempts ended with which outcome, and how long they waited and ran.

    ``wait`` and ``run`` are the numbers of attempts by bucket. ``wait_seconds`` and ``run_seconds`` are the sums. An
    attempt whose function was not called is in none of them. A task that a person has made ready has no wait.
    """

    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    cancelled: int = 0
    snoozed: int = 0
    lost: int = 0
    wait_seconds: float = 0.0
    run_seconds: float = 0.0
    wait: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    run: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    @property
    def attempts(self) -> int:
        """The number of all attempts."""
        return sum(getattr(self, outcome) for outcome in OUTCOMES)

    @property
    def finished(self) -> int:
        """The number of attempts that were the last of their task."""
        return self.succeeded + self.failed + self.cancelled

    def wait_quantile(self, share: float) -> float | None:
        """Return the quantile of the seconds from ready to claimed for ``share``; None if there was no attempt."""
        return quantile(self.wait, share)

    def run_quantile(self, share: float) -> float | None:
        """Return the quantile of the seconds for which attempts ran; None if there was no attempt."""
        return quantile(self.run, share)

    def add(self, other: Counts) -> None:
        """Add other numbers to these."""
        for kind, *numbers in other.rows():
            self.add_row(kind, *numbers)

    def add_row(self, kind: str, count: int, total: float, buckets: Sequence[int]) -> None:
        """Add the numbers of one row: of one kind."""
        if kind == WAITED:
            self.wait_seconds += total
            self.wait = _added(self.wait, buckets)
        elif kind == RAN:
            self.run_seconds += total
            self.run = _added(self.run, buckets)
        else:
            setattr(self, kind, getattr(self, kind) + count)

    def rows(self) -> Iterator[tuple[str, int, float, list[int]]]:
        """Yield kind, count, sum and buckets of each row that stores these numbers."""
        yield from ((name, count, 0.0, []) for name in OUTCOMES if (count := getattr(self, name)))
        for kind, total, buckets in ((WAITED, self.wait_seconds, self.wait), (RAN, self.run_seconds, self.run)):
            if total or any(buckets):
                yield kind, sum(buckets), total, buckets


def _added(counts: list[int], others: Sequence[int]) -> list[int]:
    return [*map(add, counts, others), *counts[len(others) :]]
