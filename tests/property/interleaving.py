"""Threads that take turns line by line, in an order that a random number generator draws, by a clock of their own.

One thread runs at a time. At each line of the watched modules it may have to give way to another, so what happens
between two lines of one may be anything that the others do. What blocks, blocks here: the time advances only when no
thread can run, straight to the next moment for which somebody waits. So an order that fails once fails each time, and a
thread that sleeps beside its work is seen at once, not by how long it takes.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty
from random import Random
from types import FrameType, SimpleNamespace
from typing import Any

#: After one line in so many, another thread gets a turn.
ONE_IN = 3
#: After so many turns without a wait, a thread polls a condition that only time changes.
MOST_TURNS_AT_ONCE = 20_000
#: The seconds, by the clock of the schedule, after which a wait counts as endless.
LONGEST = 3600.0


class Ended(BaseException):
    """Ends a thread when the schedule is over."""


class _Turn:
    def __init__(self, name: str) -> None:
        self.name = name
        self.may_run = threading.Semaphore(0)
        self.is_ready: Callable[[], bool] | None = None
        self.until: float | None = None
        self.place = ""


class Schedule:
    """The threads, their order, and the clock. ``checked`` is called whenever the time advances."""

    def __init__(self, random: Random, watched: set[str], checked: Callable[[], None]) -> None:
        self.now = self.began_at = 1000.0
        self._turns_at_once = 0
        self.time = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now, sleep=self.sleep)
        self._random = random
        self._watched = watched
        self._checked = checked
        self._turns: list[_Turn] = []
        self._threads: list[threading.Thread] = []
        self._here = threading.local()
        self._is_over = threading.Event()
        # While the next thread is chosen, the present one evaluates conditions of the watched modules.
        self._is_choosing = False
        self._failure: BaseException | None = None

    def add(self, name: str, function: Callable[[], None]) -> None:
        """Add a thread."""
        turn = _Turn(name)
        self._turns.append(turn)
        self._threads.append(threading.Thread(target=self._run, args=(turn, function), name=name, daemon=True))

    def run(self) -> None:
        """Run all threads until one calls ``end()``; raises the exception of a thread or of a check."""
        for thread in self._threads:
            thread.start()
        self._turns[0].may_run.release()
        assert self._is_over.wait(60), f"nobody ends: {self.places()}"
        for turn in self._turns:
            turn.may_run.release()
        for thread in self._threads:
            thread.join(60)
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """End all threads."""
        self._is_over.set()
        raise Ended

    def places(self) -> dict[str, str]:
        """Return where each thread waits; an empty text: it can run."""
        return {turn.name: turn.place for turn in self._turns}

    def sleeps_for(self, name: str) -> float:
        """Return for how many seconds a thread waits at most."""
        [until] = [turn.until for turn in self._turns if turn.name == name]
        return math.inf if until is None else until - self.now

    def block(self, place: str, is_ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Let the others run until something is true, or so many seconds are over. Returns which of the two it was."""
        turn = self._here.turn
        turn.is_ready, turn.place = is_ready, place
        turn.until = None if seconds in (None, math.inf) else self.now + max(0.0, seconds)
        self._give_way(turn)
        was_ready = is_ready()
        turn.is_ready, turn.until, turn.place = None, None, ""
        return was_ready

    def sleep(self, seconds: float) -> None:
        self.block("sleep", lambda: False, seconds)

    def _run(self, turn: _Turn, function: Callable[[], None]) -> None:
        self._here.turn = turn
        turn.may_run.acquire()
        with contextlib.suppress(Ended):
            try:
                if not self._is_over.is_set():
                    sys.settrace(self._trace)
                    function()
            except Ended:
                raise
            except BaseException as error:
                self._failure = self._failure or error
                self._is_over.set()
            finally:
                sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self._watched:
            return None
        is_at_work = not (self._is_choosing or self._is_over.is_set())
        if event == "line" and is_at_work and self._random.randrange(ONE_IN) == 0:
            self._give_way(self._here.turn)
        return self._trace

    def _give_way(self, turn: _Turn) -> None:
        if self._is_over.is_set():
            raise Ended
        self._is_choosing = True
        try:
            following = self._next()
        finally:
            self._is_choosing = False
        if following is not turn:
            following.may_run.release()
            turn.may_run.acquire()
        if self._is_over.is_set():
            raise Ended

    def _next(self) -> _Turn:
        while True:
            ready = [turn for turn in self._turns if turn.is_ready is None or turn.is_ready() or self._is_due(turn)]
            if ready:
                self._turns_at_once += 1
                assert self._turns_at_once < MOST_TURNS_AT_ONCE, f"time stands still: {self.places()}"
                return self._random.choice(ready)
            self._checked()
            moments = [turn.until for turn in self._turns if turn.until is not None]
            assert moments, f"everybody waits forever: {self.places()}"
            self.now, self._turns_at_once = min(moments), 0
            assert self.now < self.began_at + LONGEST, f"nobody ends: {self.places()}"

    def _is_due(self, turn: _Turn) -> bool:
        return turn.until is not None and turn.until <= self.now


class Event:
    """As ``threading.Event``."""

    def __init__(self, schedule: Schedule, place: str) -> None:
        self._schedule, self._place, self._is_set = schedule, place, False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return self._is_set or self._schedule.block(self._place, self.is_set, timeout)


class Queue:
    """As ``queue.SimpleQueue``."""

    def __init__(self, schedule: Schedule, place: str) -> None:
        self._schedule, self._place = schedule, place
        self._items: deque[Any] = deque()

    def qsize(self) -> int:
        return len(self._items)

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def get(self, timeout: float | None = None) -> Any:
        if not self._items and not self._schedule.block(self._place, lambda: bool(self._items), timeout):
            raise Empty
        return self._items.popleft()


class Lock:
    """As ``threading.Lock``, for ``with``."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._is_taken = schedule, False

    def __enter__(self) -> None:
        while self._is_taken:
            self._schedule.block("lock", lambda: not self._is_taken)
        self._is_taken = True

    def __exit__(self, *error: object) -> None:
        self._is_taken = False


@contextlib.contextmanager
def by_clock_of(schedule: Schedule, *modules: Any) -> Iterator[None]:
    """Let modules see the schedule's time."""
    clocks = [(module, module.time) for module in modules]
    for module in modules:
        module.time = schedule.time
    try:
        yield
    finally:
        for module, clock in clocks:
            module.time = clock
