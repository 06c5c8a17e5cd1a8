"""The supervisor: keeps a number of worker processes running. It runs no tasks itself.

Its loop has one thread. If the processes share a heartbeat, further threads beat and listen for them
(``shared_heartbeat.py``).

Each process is a new interpreter with the command line of the supervisor. It has its own terminal session, so that a
Ctrl-C on the terminal reaches it only once: through the supervisor.
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

from django_pglock.loggers import WORKER, get_logger
from django_pglock.worker.liveness.heartbeat_process_main import LONGEST, is_running
from django_pglock.worker.liveness.session_watch import Deadlines
from django_pglock.worker.supervising.channel import (
    ENDING,
    HANG_UP,
    HEARTBEAT_FD,
    LEFT_BEHIND,
    NUMBER,
    REPLACE,
    STOP_NOW,
    stop_signals,
)
from django_pglock.worker.supervising.shared_heartbeat import SharedHeartbeat

logger = get_logger(WORKER)

#: Seconds before a process that ended unexpectedly is started again. Doubled each time, up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
#: If a process has lived for this number of seconds, its end is not counted as one more failure in a row.
STABLE_AFTER = 60.0
#: Seconds beyond the grace period within which a process must write its last outcomes and end.
MARGIN = 30.0
#: Seconds between two checks of a process that runs but sends no messages.
CHECK_INTERVAL = 1.0
#: Seconds for the shared heartbeats to close their sessions at the end.
CLOSE_WITHIN = 2.0


def pause_after(failures: int) -> float:
    """Return the seconds to wait after a number of unexpected ends in a row, with jitter."""
    bound = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10))
    return random.uniform(bound / 2, bound)  # noqa: S311


class Supervisor:
    """Runs ``command`` in ``processes`` processes until SIGTERM or SIGINT.

    At the first signal the processes finish their tasks, at the second they give them back. A process that ends
    unexpectedly is started again, after a pause that grows with each failure in a row. A process that asks for its
    replacement is replaced at once. ``grace`` is the number of seconds that running tasks get to finish.
    ``silence`` is the number of seconds for which a process may send no messages. After that, it counts as frozen
    if it is stopped. If it runs, a task keeps its threads from running. This is allowed for as long as the
    heartbeat process beats for it. With ``drain``, a process that ends with exit code 0 has done all its work. A
    process that ends with ``LEFT_BEHIND`` has done all work that it could. ``heartbeats`` are distributed among the
    processes; empty: each process beats by itself.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        processes: int,
        grace: float,
        silence: float,
        drain: bool = False,
        heartbeats: Sequence[SharedHeartbeat] = (),
    ) -> None:
        self.command = command
        self.grace = grace
        self.silence = silence
        self.drain = drain
        self.heartbeats = heartbeats
        self._services = [Deadlines(heartbeats), *heartbeats] if heartbeats else []
        self.children: list[ChildProcess] = []
        self._failures: Counter[int] = Counter()
        # The numbers of the processes that have to be started, and when.
        self._starts = dict.fromkeys(range(1, processes + 1), 0.0)
        self._selector = selectors.DefaultSelector()
        self._signals = self._passed_on = 0
        self._code = 0

    def run(self) -> int:
        """Run until all processes have ended. Return the exit code: 0 if each has ended in order, otherwise 1."""
        with self._signal_handlers(), self._selector, self._running_services():
            while self._starts or self.children:
                self._start_what_is_due()
                self._wait()
                self._pass_on_signals()
                for child in list(self.children):
                    self._check(child)
        return self._code

    @contextmanager
    def _running_services(self) -> Iterator[None]:
        for service in self._services:
            service.start()
        try:
            yield
        finally:
            for service in self._services:
                service.stop()
            for service in self._services:
                service.wait(CLOSE_WITHIN)

    def _heartbeat_of(self, number: int) -> SharedHeartbeat | None:
        return self.heartbeats[(number - 1) % len(self.heartbeats)] if self.heartbeats else None

    # Signals

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        ours, wakeup = socket.socketpair()
        with ours, wakeup:
            for end in (ours, wakeup):
                end.setblocking(False)
            self._selector.register(ours, selectors.EVENT_READ, ours)
            earlier_wakeup = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
            # SIGCHLD has an empty handler. Without a handler, the signal would not wake this thread.
            handlers: dict[int, Any] = {
                **dict.fromkeys(stop_signals(), self._on_signal),
                signal.SIGCHLD: lambda *_: None,
            }
            earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
            try:
                yield
            finally:
                signal.set_wakeup_fd(earlier_wakeup)
                for number, handler in earlier.items():
                    signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        # A shell and the kernel may both send a SIGHUP, so it never counts as the second signal.
        self._signals = max(1, self._signals + (number != HANG_UP))

    def _pass_on_signals(self) -> None:
        signals = self._signals
        if signals > 0 and self._passed_on == 0:
            self._starts.clear()
            for child in self.children:
                child.end(within=self.grace + MARGIN)
        if signals > 1 and self._passed_on < signals:
            for child in self.children:
                child.stop_now(within=MARGIN)
        self._passed_on = signals

    # Turns

    def _wait(self) -> None:
        """Sleep until a signal or a message comes, or a start, a check or a kill is due."""
        moments = [*self._starts.values()]
        for child in self.children:
            moments += [] if child.kill_at is None or child.is_killed else [child.kill_at]
            moments += [] if child.last_message_at is None or child.is_killed else [self._check_due(child)]
        timeout = max(0.0, min(moments) - time.monotonic()) if moments else None
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, socket.socket):
                # A signal has come, and its handler has run. The bytes that woke this thread mean nothing more.
                with suppress(BlockingIOError):
                    key.data.recv(1024)
            else:
                self._receive(key.data)

    def _start_what_is_due(self) -> None:
        for number in [each for each, moment in self._starts.items() if moment <= time.monotonic()]:
            del self._starts[number]
            try:
                child = ChildProcess(number, self.command, self._heartbeat_of(number))
            except OSError as error:
                self._start_later(number, f"worker-{number} cannot be started ({error})")
            else:
                self.children.append(child)
                self._selector.register(child.channel, selectors.EVENT_READ, child)
                logger.info("Started %r.", child)

    def _start_later(self, number: int, why: str) -> None:
        self._failures[number] += 1
        pause = pause_after(self._failures[number])
        logger.warning("%s. It is started again in %.1f s.", why, pause)
        self._starts[number] = time.monotonic() + pause

    def _receive(self, child: ChildProcess) -> None:
        messages = child.receive()
        if messages == b"":
            self._selector.unregister(child.channel)
            child.channel.close()
            # It sends no more messages, and ends as if its supervisor had ended. If it freezes, only this time ends it.
            if child.kill_at is None:
                child.kill_at = time.monotonic() + self.grace + MARGIN
        elif messages is not None:
            if REPLACE in messages:
                self._replace(child)
            if ENDING in messages and child.kill_at is None:
                child.kill_at = time.monotonic() + self.grace + MARGIN

    def _replace(self, child: ChildProcess) -> None:
        if not child.is_replaced and self._signals == 0:
            logger.info("Replacing %r, which has reported that it will end.", child)
            child.is_replaced = True
            self._failures[child.number] = 0
            self._starts[child.number] = 0.0

    def _check(self, child: ChildProcess) -> None:
        if child.process.poll() is not None:
            self._on_end(child)
        elif not child.is_killed:
            now = time.monotonic()
            if child.last_message_at is not None and now > self._check_due(child):
                child.seen_at = now
                self._kill_if_frozen(child, now - child.last_message_at)
            elif child.kill_at is not None and now >= child.kill_at:
                logger.error("%r has not ended in time. It is killed.", child)
                child.kill()

    def _check_due(self, child: ChildProcess) -> float:
        return max((child.last_message_at or 0.0) + self.silence, child.seen_at + CHECK_INTERVAL)

    def _kill_if_frozen(self, child: ChildProcess, silence: float) -> None:
        if silence > LONGEST or not is_running(child.process.pid):
            logger.error("%r has been frozen for %.0f s. It is killed.", child, silence)
            child.kill()

    def _on_end(self, child: ChildProcess) -> None:
        if child.channel.fileno() >= 0:
            # Its last message may be a request for its replacement.
            self._receive(child)
        if child.channel.fileno() >= 0:
            self._selector.unregister(child.channel)
            child.channel.close()
        self.children.remove(child)
        code = child.process.returncode
        # SIGTERM kills a process that has not installed its handler yet.
        is_in_order = code == 0 or (self._signals > 0 and code == -signal.SIGTERM)
        if child.is_replaced or self._signals or (self.drain and code in (0, LEFT_BEHIND)):
            logger.log(logging.INFO if is_in_order else logging.ERROR, "%r has ended %s.", child, in_words(code))
            self._code = self._code if is_in_order or child.is_replaced else 1
        else:
            if time.monotonic() - child.started_at >= STABLE_AFTER:
                self._failures[child.number] = 0
            self._start_later(child.number, f"{child!r} has ended unexpectedly {in_words(code)}")


def in_words(code: int) -> str:
    """Return an exit code in words, for messages."""
    if code >= 0:
        return f"with exit code {code}"
    with suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"


class ChildProcess:
    """One process, and the supervisor's end of its channel. Raises ``OSError`` if the process cannot be started.

    ``shared`` is the heartbeat that beats for the process; None: the process beats by itself.
    """

    def __init__(self, number: int, command: Sequence[str], shared: SharedHeartbeat | None = None) -> None:
        self.number = number
        self.channel, theirs = socket.socketpair()
        heartbeat_socket, their_heartbeat_socket = socket.socketpair()
        with theirs, their_heartbeat_socket:
            environment = {**os.environ, NUMBER: str(number)}
            if shared is not None:
                environment[HEARTBEAT_FD] = str(their_heartbeat_socket.fileno())
            try:
                self.process = subprocess.Popen(  # noqa: S603
                    command,
                    stdin=theirs.fileno(),
                    # Without HEARTBEAT_FD, the process would pass the socket on to the programs that its tasks start.
                    pass_fds=[] if shared is None else [their_heartbeat_socket.fileno()],
                    start_new_session=True,
                    env=environment,
                )
            except OSError:
                self.channel.close()
                heartbeat_socket.close()
                raise
        if shared is None:
            heartbeat_socket.close()
        else:
            shared.add(heartbeat_socket)
        self.channel.setblocking(False)
        self.started_at = time.monotonic()
        #: When its last message came. None: no message yet, because a start may take any time; or its channel is
        #: closed.
        self.last_message_at: float | None = None
        #: When the supervisor last found that the process runs although it sends no messages.
        self.seen_at = 0.0
        #: Another process has replaced it.
        self.is_replaced = False
        #: When it will be killed if it has not ended.
        self.kill_at: float | None = None
        self.is_killed = False

    def __repr__(self) -> str:
        return f"worker-{self.number}[{self.process.pid}]"

    def receive(self) -> bytes | None:
        """Return the messages that have arrived. Empty: the channel is closed. None: there is no message."""
        try:
            messages = self.channel.recv(1024)
        except BlockingIOError:
            return None
        except OSError:
            messages = b""
        self.last_message_at = time.monotonic() if messages else None
        return messages

    def end(self, *, within: float) -> None:
        """Request that the process finishes its tasks and ends ``within`` this number of seconds."""
        self.process.send_signal(signal.SIGTERM)
        self.kill_at = time.monotonic() + within

    def stop_now(self, *, within: float) -> None:
        """Request that the process gives back all tasks and ends ``within`` this number of seconds."""
        with suppress(OSError):
            self.channel.send(STOP_NOW)
        self.kill_at = time.monotonic() + within

    def kill(self) -> None:
        """Kill the process."""
        self.is_killed = True
        self.process.kill()
