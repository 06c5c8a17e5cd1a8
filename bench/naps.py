"""Tasks that last a while, as real ones do: how much of what the threads could do, they do.

What a thread could do at best is one task after the other, without a pause between two: threads divided by seconds. A
figure is the share of that. Work that waits, and does not compute, stands for calls of other services and of databases;
on a busy machine it is disturbed least.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.contestants.base import Contestant
    from bench.rounds import Bench

#: Milliseconds that a task waits.
NAPS = (5, 20, 30, 50, 100, 400)
THREADS = (1, 2, 4, 8)
#: Seconds for which one case runs, about, and the fewest tasks for each thread: they begin together, and end together.
SECONDS, FEWEST = 2.5, 20


def aim(milliseconds: int, *, is_atomic: bool) -> float:
    """Return the share of the ideal that is asked for."""
    if milliseconds <= 5:
        return 0.5 if is_atomic else 0.7
    return 0.95 if milliseconds >= 100 else 0.9


class Nap:
    """One case: so many at once, each so many milliseconds, of this function."""

    def __init__(
        self, name: str, at_once: int, milliseconds: int, function: str, aim: float, *, threads: int | None = None
    ) -> None:
        self.name = name
        self.at_once = at_once
        self.milliseconds = milliseconds
        self.ideal = at_once * 1000 / milliseconds
        self.aim = aim
        self.function = function
        self.threads = at_once if threads is None else threads

    def rate(self, bench: Bench, contestant: Contestant) -> float:
        """Return the share of the ideal that one worker process reaches."""
        count = max(FEWEST * self.at_once, int(self.ideal * SECONDS))
        seconds = str(self.milliseconds / 1000)
        with (
            bench.arena.filled(contestant, count, self.function, seconds) as database,
            bench.arena.worker(contestant, *contestant.at_once(self.threads)),
        ):
            return bench.arena.rate(contestant, database, count, self.function) / self.ideal


def plain() -> Iterator[Nap]:
    """Yield the cases that all contestants run."""
    for threads in THREADS:
        for milliseconds in NAPS:
            aimed = aim(milliseconds, is_atomic=False)
            yield Nap(f"{milliseconds} ms, {threads} at once", threads, milliseconds, "sleep", aimed)


def ours_alone() -> Iterator[Nap]:
    """Yield the cases that ask for more than to run a function."""
    for threads in THREADS:
        for milliseconds in NAPS:
            aimed = aim(milliseconds, is_atomic=True)
            name = f"atomic, {milliseconds} ms, {threads} thread{'s' * (threads > 1)}"
            yield Nap(name, threads, milliseconds, "sleep_atomically", aimed)
    yield Nap("100 coroutines, 500 ms", 100, 500, "sleep_async", 0.8, threads=4)
    yield Nap("a key each, 5 ms, 4 threads", 4, 5, "sleep_with_own_key", 0.8)
    yield Nap("a key each, 50 ms, 4 threads", 4, 50, "sleep_with_own_key", 0.8)
    yield Nap("ten keys, 5 ms, 4 threads", 4, 5, "sleep_with_one_of_ten", 0.7)
    yield Nap("one key, 5 ms, 4 threads", 1, 5, "sleep_alone", 0.5, threads=4)
    yield Nap("one key, 50 ms, 4 threads", 1, 50, "sleep_alone", 0.85, threads=4)


def table(
    bench: Bench, contestants: Sequence[Contestant], ours: Contestant, verdict: Callable[[bool, str], str]
) -> list[Sequence[str]]:
    """Measure all cases and return the rows of a table, one column for each contestant."""
    cases: dict[str, Callable[[], Any]] = {}
    shared, alone = ([nap for nap in each if bench.cases in nap.name] for each in (plain(), ours_alone()))
    naps = [*shared, *alone]
    for nap in naps:
        for each in contestants if nap in shared else [ours]:
            cases[f"{each.name}: {nap.name}"] = partial(nap.rate, bench, each)
    found = bench.measure(cases)
    rows: list[Sequence[str]] = [("share of the ideal", *(each.name for each in contestants), "aim")]
    for nap in naps:
        shares = [found.get(f"{each.name}: {nap.name}") for each in contestants]
        cells = [f"{statistics.median(share):.2f}" if share else "" for share in shares]
        own = found.get(f"{ours.name}: {nap.name}")
        is_met = bool(own) and round(statistics.median(own or [0]), 2) >= nap.aim
        rows.append((nap.name, *cells, verdict(is_met, f"at least {nap.aim:g}")))
    return rows
