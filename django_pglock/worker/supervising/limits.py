"""The limits of a worker process: it is replaced after a number of tasks, at a size of memory, or after a time."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from django_pglock.worker.in_flight import InFlight

#: ``max_time`` is shortened by up to this share at random, so that not all processes end together.
JITTER = 0.1
MEBIBYTE = 2**20


class Limits:
    """The limits of one process: ``max_memory`` in MiB, ``max_time`` in seconds. ``InFlight`` counts the tasks."""

    def __init__(self, in_flight: InFlight, *, max_memory: float | None, max_time: float | None) -> None:
        self.in_flight = in_flight
        self.max_memory = max_memory
        time_left = None if max_time is None else max_time * random.uniform(1 - JITTER, 1)  # noqa: S311
        self._ends_at = None if time_left is None else time.monotonic() + time_left

    def reached(self) -> str:
        """Return in words which limit is reached; empty: none."""
        if self.in_flight.claims_left == 0 and not self.in_flight.claims:
            return "it has run its maximum number of tasks"
        # Only after one task. If the limit is below the memory of the project itself, the worker still runs some tasks.
        if (
            self.max_memory is not None
            and self.in_flight.has_ended_any
            and resident_memory() > self.max_memory * MEBIBYTE
        ):
            return f"it uses {resident_memory() / MEBIBYTE:.0f} MiB of memory"
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            return "its maximum time is over"
        return ""


def resident_memory() -> int:
    """Return how many bytes of memory the process uses now or, on systems that do not report this, at its peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
