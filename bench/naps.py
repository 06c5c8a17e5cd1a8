"""Tasks that last a while, as real ones do: how much of what the threads could do, they do.

What a thread could do at best is one task after the other, without a pause between two: threads divided by seconds. A
figure is the share of that. Work that waits, and does not compute, stands for calls of other services and of databases;
on a busy machine it is disturbed least.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from bench.contestants.base import ATOMIC, COROUTINE, LOCKED, PLAIN
from bench.rounds import OURS

if TYPE_CHECKING:
    import psycopg

    from bench.contestants.base import Contestant
    from bench.rounds import Bench
    from bench.testbed import Testbed

#: Milliseconds that a task waits.
NAPS = (5, 20, 50, 100, 400)
#: The fewest and the most. The table of docs/evidence/performance.md also had two and four.
THREADS = (1, 8)
#: Seconds for which one case runs, about, and the fewest tasks for each thread: they begin together, and end together.
#: A case takes longer to prepare than to run.
SECONDS, FEWEST = 1.5, 8


def aim(milliseconds: int, *, is_atomic: bool) -> float:
    """Return the share of the ideal that is asked for."""
    if milliseconds <= 5:
        return 0.5 if is_atomic else 0.7
    return 0.95 if milliseconds >= 100 else 0.9


@dataclass(frozen=True)
class Nap:
    """One case: so many at once, each so many milliseconds."""

    name: str
    at_once: int
    milliseconds: int
    #: The least share of the ideal.
    aim: float
    kind: str = PLAIN
    #: The number of keys of a kind with keys. 0: one for each call.
    keys: int = 0
    #: What the worker may run at once, where keys let it run less.
    limit: int = 0

    @property
    def ideal(self) -> float:
        return self.at_once * 1000 / self.milliseconds

    def rate(self, bench: Bench, contestant: Contestant) -> float:
        """Return the share of the ideal that one worker process reaches."""
        # Some look for the next task of a key only when they poll.
        slowness = contestant.slowness if self.kind == LOCKED else 1
        count = max(FEWEST * self.at_once, int(self.ideal * SECONDS / slowness))
        function = contestant.naps[self.kind]
        with (
            self._filled(bench.testbed, contestant, count, function) as database,
            bench.testbed.worker(contestant, *self._options(contestant)),
        ):
            return bench.testbed.rate(contestant, database, count, function) / self.ideal

    def _filled(self, testbed: Testbed, contestant: Contestant, count: int, function: str) -> psycopg.Connection:
        seconds = str(self.milliseconds / 1000)
        if self.kind == LOCKED:
            return testbed.filled_by_key(contestant, count, "locked_sleep", self.keys or count, seconds)
        return testbed.filled(contestant, count, function, seconds)

    def _options(self, contestant: Contestant) -> list[str]:
        # Our coroutines are not limited by threads.
        is_default = self.kind == COROUTINE and contestant.name == OURS
        return [] if is_default else contestant.at_once(self.limit or self.at_once)


def naps() -> Iterator[Nap]:
    """Yield all cases."""
    for threads, milliseconds in product(THREADS, NAPS):
        name = f"{milliseconds} ms, {threads} at once"
        yield Nap(name, threads, milliseconds, aim(milliseconds, is_atomic=False))
    for threads, milliseconds in product(THREADS, NAPS):
        name = f"atomic, {milliseconds} ms, {threads} thread{'s' * (threads > 1)}"
        yield Nap(name, threads, milliseconds, aim(milliseconds, is_atomic=True), ATOMIC)
    yield Nap("100 coroutines, 500 ms", 100, 500, 0.8, COROUTINE)
    yield Nap("a key each, 5 ms, 4 threads", 4, 5, 0.8, LOCKED)
    yield Nap("a key each, 50 ms, 4 threads", 4, 50, 0.8, LOCKED)
    yield Nap("ten keys, 5 ms, 4 threads", 4, 5, 0.7, LOCKED, keys=10)
    yield Nap("one key, 5 ms, 4 threads", 1, 5, 0.5, LOCKED, keys=1, limit=4)
    yield Nap("one key, 50 ms, 4 threads", 1, 50, 0.85, LOCKED, keys=1, limit=4)


def table(bench: Bench, contestants: Sequence[Contestant], verdict: Callable[[bool, str], str]) -> list[Sequence[str]]:
    """Measure all cases and return the rows of a table, one column for each contestant."""
    wanted = [nap for nap in naps() if bench.cases in nap.name]
    cases: dict[str, Callable[[], Any]] = {
        f"{each.name}: {nap.name}": partial(nap.rate, bench, each)
        for nap in wanted
        for each in contestants
        if nap.kind in each.naps
    }
    found = bench.measure(cases)
    rows: list[Sequence[str]] = [("share of the ideal", *(each.name for each in contestants), "aim")]
    for nap in wanted:
        shares = [found.get(f"{each.name}: {nap.name}") for each in contestants]
        cells = [f"{statistics.median(share):.2f}" if share else "" for share in shares]
        own = found.get(f"{OURS}: {nap.name}")
        is_met = bool(own) and round(statistics.median(own or [0]), 2) >= nap.aim
        rows.append((nap.name, *cells, verdict(is_met, f"at least {nap.aim:g}")))
    return rows
