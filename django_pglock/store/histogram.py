"""Histograms of durations with fixed buckets, so that the histograms of several workers and minutes can be added.

The upper bounds grow by a factor of the square root of 2, from one millisecond to twelve days. A duration that equals a
bound belongs to the bucket below it. The buckets of rows that are stored must never change.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

#: The upper bounds of the buckets in seconds. One more bucket is for longer durations.
BOUNDS = tuple(0.001 * 2 ** (step / 2) for step in range(61))
#: The number of buckets.
BUCKETS = len(BOUNDS) + 1
#: The bounds of one bucket differ by this factor.
FACTOR = math.sqrt(2)


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
