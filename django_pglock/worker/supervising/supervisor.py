"""Keeps a number of worker processes running: one thread, no database, and nothing of the tasks.

Each is a fresh interpreter that runs this process's own command line, in a session of its own, so that a Ctrl-C on the
terminal reaches it once: through us.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from django_pglock.worker.claiming.drain import LEFT_BEHIND
from django_pglock.worker.liveness.heartbeat_process_main import LONGEST, is_running
from django_pglock.worker.supervising.channel import ENDING, HURRY, NUMBER, REPLACE

logger = logging.getLogger("django_pglock.worker")

#: Seconds before a process that ended unexpectedly is started again; doubled each time up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
#: Seconds that a process must have lived for its end not to count as one more in a row.
STABLE = 60.0
#: Seconds beyond the grace in which a process has to have written its last outcomes and ended.
MARGIN = 30.0
#: Seconds between two looks at a process that says nothing but runs.
BETWEEN_LOOKS = 1.0


def pause_after(failures: int) -> float:
    """Return the seconds to wait after so many unexpected ends in a row, with jitter."""
    bound = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10))
    return random.uniform(bound / 2, bound)  # noqa: S311


class Child:
    """One process, and our end of the line to it. Raises ``OSError`` if it cannot be started."""

    def __init__(self, number: int, command: Sequence[str]) -> None:
        self.number = number
        self.line, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(  # noqa: S603
                    command, stdin=theirs.fileno(), start_new_session=True, env={**os.environ, NUMBER: str(number)}
                )
            except OSError:
                self.line.close()
                raise
        self.line.setblocking(False)
        self.started_at = time.monotonic()
        #: When it was heard last. None: not yet, for to start takes as long as it takes; or its line is closed.
        self.heard_at: float | None = None
        #: When it was last seen to run although it says nothing.
        self.seen_at = 0.0
        #: Another process has its place.
        self.is_replaced = False
        #: When it has to be gone.
        self.kill_at: float | None = None
        self.is_killed = False

    def __repr__(self) -> str:
        return f"worker-{self.number}[{self.process.pid}]"

    def hear(self) -> bytes | None:
        """Return what the process has said; nothing: its line is closed; None: it has not said anything."""
        try:
            words = self.line.recv(1024)
        except BlockingIOError:
            return None
        except OSError:
            words = b""
        self.heard_at = time.monotonic() if words else None
        return words

    def end(self, *, within: float) -> None:
        """Ask it to drain and end within so many seconds."""
        self.process.send_signal(signal.SIGTERM)
        self.kill_at = time.monotonic() + within

    def hurry(self, *, within: float) -> None:
        """Ask it to give back everything and end within so many seconds."""
        with suppress(OSError):
            self.line.send(HURRY)
        self.kill_at = time.monotonic() + within

    def kill(self) -> None:
        """End it whatever it does."""
        self.is_killed = True
        self.process.kill()


class Supervisor:
    """Runs ``command`` in ``processes`` processes until SIGTERM or SIGINT: the first lets them drain, a second hurries.

    A process that ends unexpectedly is started again, after a pause that grows while that happens again and again; one
    that asks for it is replaced at once. ``grace``: the seconds that tasks get to finish in each; ``silence``: the
    seconds without a sign of life after which a process is frozen if it does not run; if it does, a task keeps its
    threads from running, for which it has as long as its guard speaks for it. With ``drain`` a process that ends with 0
    has done its work, and one that ends with ``LEFT_BEHIND`` all that it could.
    """

    def __init__(
        self, command: Sequence[str], *, processes: int, grace: float, silence: float, drain: bool = False
    ) -> None:
        self.command = command
        self.grace = grace
        self.silence = silence
        self.drain = drain
        self.children: list[Child] = []
        self._failures: Counter[int] = Counter()
        # Numbers of processes that are to be started, and when.
        self._starts = dict.fromkeys(range(1, processes + 1), 0.0)
        self._selector = selectors.DefaultSelector()
        self._signals = self._passed_on = 0
        self._code = 0

    def run(self) -> int:
        """Run until all processes are gone and return the exit code: 0 if each of them ended in order, else 1."""
        with self._hearing_signals(), self._selector:
            while self._starts or self.children:
                self._start_what_is_due()
                self._wait()
                self._pass_on_signals()
                for child in list(self.children):
                    self._look_at(child)
        return self._code

    # Signals

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        ours, wakeup = socket.socketpair()
        with ours, wakeup:
            for end in (ours, wakeup):
                end.setblocking(False)
            self._selector.register(ours, selectors.EVENT_READ)
            earlier_wakeup = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
            # The end of a child has no need of a handler, but without one it would not wake us.
            handlers = {signal.SIGTERM: self._note, signal.SIGINT: self._note, signal.SIGCHLD: lambda *_: None}
            earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
            try:
                yield
            finally:
                signal.set_wakeup_fd(earlier_wakeup)
                for number, handler in earlier.items():
                    signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self._signals += 1

    def _pass_on_signals(self) -> None:
        signals = self._signals
        if signals > 0 and self._passed_on == 0:
            self._starts.clear()
            for child in self.children:
                child.end(within=self.grace + MARGIN)
        if signals > 1 and self._passed_on < signals:
            for child in self.children:
                child.hurry(within=MARGIN)
        self._passed_on = signals

    # Turns

    def _wait(self) -> None:
        """Sleep until a signal or a word comes, or something is due."""
        moments = [*self._starts.values()]
        for child in self.children:
            moments += [] if child.kill_at is None or child.is_killed else [child.kill_at]
            moments += [] if child.heard_at is None or child.is_killed else [self._look_due(child)]
        timeout = max(0.0, min(moments) - time.monotonic()) if moments else None
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                with suppress(BlockingIOError):
                    key.fileobj.recv(1024)  # type: ignore[union-attr]
            else:
                self._hear(key.data)

    def _start_what_is_due(self) -> None:
        for number in [each for each, moment in self._starts.items() if moment <= time.monotonic()]:
            del self._starts[number]
            try:
                child = Child(number, self.command)
            except OSError as error:
                self._start_later(number, f"worker-{number} cannot be started ({error})")
            else:
                self.children.append(child)
                self._selector.register(child.line, selectors.EVENT_READ, child)
                logger.info("Started %r.", child)

    def _start_later(self, number: int, why: str) -> None:
        self._failures[number] += 1
        pause = pause_after(self._failures[number])
        logger.warning("%s; it is started again in %.1f s.", why, pause)
        self._starts[number] = time.monotonic() + pause

    def _hear(self, child: Child) -> None:
        words = child.hear()
        if words == b"":
            self._selector.unregister(child.line)
            child.line.close()
        elif words is not None:
            if REPLACE in words:
                self._replace(child)
            if ENDING in words and child.kill_at is None:
                child.kill_at = time.monotonic() + self.grace + MARGIN

    def _replace(self, child: Child) -> None:
        if not child.is_replaced and self._signals == 0:
            logger.info("Replacing %r, which has said that it will end.", child)
            child.is_replaced = True
            self._failures[child.number] = 0
            self._starts[child.number] = 0.0

    def _look_at(self, child: Child) -> None:
        if child.process.poll() is not None:
            self._bury(child)
        elif not child.is_killed:
            now = time.monotonic()
            if child.heard_at is not None and now > self._look_due(child):
                child.seen_at = now
                self._kill_if_frozen(child, now - child.heard_at)
            elif child.kill_at is not None and now >= child.kill_at:
                logger.error("%r has not ended in time; it is killed.", child)
                child.kill()

    def _look_due(self, child: Child) -> float:
        return max((child.heard_at or 0.0) + self.silence, child.seen_at + BETWEEN_LOOKS)

    def _kill_if_frozen(self, child: Child, silence: float) -> None:
        if silence > LONGEST or not is_running(child.process.pid):
            logger.error("%r has been frozen for %.0f s; it is killed.", child, silence)
            child.kill()

    def _bury(self, child: Child) -> None:
        if child.line.fileno() >= 0:
            # It may have asked for its replacement with its last words.
            self._hear(child)
        if child.line.fileno() >= 0:
            self._selector.unregister(child.line)
            child.line.close()
        self.children.remove(child)
        code = child.process.returncode
        # SIGTERM ends a process that has not yet come as far as to wait for it.
        is_in_order = code == 0 or (self._signals > 0 and code == -signal.SIGTERM)
        if child.is_replaced or self._signals or (self.drain and code in (0, LEFT_BEHIND)):
            logger.log(logging.INFO if is_in_order else logging.ERROR, "%r has ended %s.", child, said(code))
            self._code = self._code if is_in_order or child.is_replaced else 1
        else:
            if time.monotonic() - child.started_at >= STABLE:
                self._failures[child.number] = 0
            self._start_later(child.number, f"{child!r} has ended unexpectedly {said(code)}")


def said(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"with exit code {code}"
    with suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"
