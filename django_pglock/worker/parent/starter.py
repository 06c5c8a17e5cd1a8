"""Starts the children of a parent: by a fork or, where a fork is not safe, as new interpreters.

The forks are made by a process of their own, the starter. It is forked by the parent before the parent opens a session
or starts a thread, and it never does either. So each child begins as the parent was after it had loaded the project:
with no lock held by a thread that the child does not have, no session that the child must not use, and no background
thread of an SDK that the child would believe to run. Most of the memory is shared (``gc.freeze``).

The kernel ends the starter if the parent dies, and the children if the starter dies. Where there is no such signal, and
while C code keeps a child from seeing the closed channel, the child ends a moment later.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from contextlib import suppress

from django.db import connections

from django_pglock.errors import ConfigurationError
from django_pglock.postgres.forking import die_with_parent

#: The environment variable with the descriptor of the channel and the parent's process id, in a new interpreter.
CHANNEL_FD = "DJANGO_PGLOCK_CHANNEL"
#: The exit code of a child whose code raised an error.
FAILED = 1
_LONGEST_MESSAGE = 65_536
#: Seconds between two signals that continue a starter, which does nothing while it is stopped.
_CONTINUE_INTERVAL = 1.0

#: What a child does with its end of the channel. It returns the exit code.
RunChild = Callable[[socket.socket], int]
#: Called with the key of a child that has ended, and its exit code, negative for a signal; or why it cannot be started.
OnEnd = Callable[[str, int | str], None]


def make_starter(
    loop: AbstractEventLoop,
    run_child: RunChild,
    command: Callable[[], Sequence[str]],
    on_end: OnEnd,
    on_lost: Callable[[], None],
) -> Starter:
    """Return the starter for this system: call it before the process opens sessions and starts threads.

    Callbacks are called in the loop's thread. ``on_lost`` is called if the starter has ended, and all children with it.
    """
    return ForkStarter(loop, run_child, on_end, on_lost) if may_fork() else SpawnStarter(loop, command(), on_end)


def may_fork() -> bool:
    """Return whether children may be forks. ``multiprocessing.set_start_method("spawn")`` says that they may not."""
    asked = multiprocessing.get_start_method(allow_none=True)
    return hasattr(os, "fork") and sys.platform != "darwin" and asked != "spawn"


class ForkStarter:
    """The parent's side of the process that forks the children.

    A message to it is the key of a child: with a descriptor, the child is started, and without one it is killed.
    """

    def __init__(
        self, loop: AbstractEventLoop, run_child: RunChild, on_end: OnEnd, on_lost: Callable[[], None]
    ) -> None:
        self.loop = loop
        self.on_end = on_end
        self.on_lost = on_lost
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connections.close_all()
        gc.collect()
        gc.freeze()
        _flush_output()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._control.close()
            run_to_end(lambda: ForkServer(theirs, run_child).serve(parent))
        #: The processes that it has to reap.
        self.pids = [self.pid]
        theirs.close()
        self._control.setblocking(False)
        loop.add_reader(self._control.fileno(), self._receive)
        self._continue()

    def start(self, key: str, channel: socket.socket) -> None:
        """Start a child with its end of the channel, which the caller closes. ``key`` is any name for it."""
        try:
            socket.send_fds(self._control, [key.encode()], [channel.fileno()])
        except OSError as error:
            self.on_end(key, str(error))

    def kill(self, key: str) -> None:
        """Kill a child, if it has not ended."""
        with suppress(OSError):
            self._control.send(key.encode())

    def close(self) -> None:
        """Start nothing more. All children have ended, or are killed."""
        self.loop.remove_reader(self._control.fileno())
        # It has nothing more to do, and may be stopped.
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self._control.close()

    def _receive(self) -> None:
        try:
            while data := self._control.recv(_LONGEST_MESSAGE):
                self.on_end(*json.loads(data))
        except BlockingIOError:
            return
        except OSError:
            pass  # it has ended with requests unread
        self.loop.remove_reader(self._control.fileno())
        self.on_lost()

    def _continue(self) -> None:
        """Continue the starter, if a user has stopped it. While it is stopped, no child is replaced."""
        if self._control.fileno() >= 0:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            self.loop.call_later(_CONTINUE_INTERVAL, self._continue)


class ForkServer:
    """The starter itself: forks children, signals them, and tells their ends. One thread and no session."""

    def __init__(self, control: socket.socket, run_child: RunChild) -> None:
        self._control = control
        self._run_child = run_child
        # Their process ids, by their keys.
        self._children: dict[str, int] = {}
        # A signal, for which nothing else waits, ends the wait for requests.
        self._signals, self._wakeup = socket.socketpair()
        for each in (control, self._signals, self._wakeup):
            each.setblocking(False)

    def serve(self, parent: int) -> int:
        """Serve until the parent has ended or has closed its end."""
        die_with_parent(parent)
        # The exit functions of the parent are not for its children: they delete temporary files, for example. Functions
        # that a fork of a child or the child itself registers are called at its end (child.py), as by multiprocessing.
        atexit._clear()  # noqa: SLF001
        # The parent ends the children: signals that reach all processes of a group are for the parent.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        # A ConnectionError: the parent has died, and has not read all.
        with suppress(EOFError, ConnectionError):
            while True:
                select.select([self._control, self._signals], [], [])
                with suppress(BlockingIOError):
                    self._signals.recv(_LONGEST_MESSAGE)
                with suppress(BlockingIOError):
                    self._serve_requests()
                self._reap()
        for pid in self._children.values():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return 0

    def _serve_requests(self) -> None:
        """Serve what the parent has asked for. Raises ``EOFError`` if it has closed its end."""
        while True:
            data, descriptors, *_ = socket.recv_fds(self._control, _LONGEST_MESSAGE, 1)
            key = data.decode()
            if descriptors:
                os.set_inheritable(descriptors[0], False)
                self._start(key, socket.socket(fileno=descriptors[0]))
            elif key in self._children:
                # A process that has ended keeps its number until it is reaped, which only this thread does.
                with suppress(OSError):
                    os.kill(self._children[key], signal.SIGKILL)
            elif not data:
                raise EOFError

    def _start(self, key: str, channel: socket.socket) -> None:
        starter = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(key, str(error))
            channel.close()
            return
        if pid == 0:
            die_with_parent(starter)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (self._signals, self._wakeup, self._control):
                each.close()
            run_to_end(lambda: self._run_child(channel))
        channel.close()
        self._children[key] = pid

    def _reap(self) -> None:
        # SIGCHLD has woken the loop for this.
        for key, pid in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[key]
                self._tell(key, os.waitstatus_to_exitcode(status))

    def _tell(self, key: str, end: int | str) -> None:
        # It may wait for the parent to read, which has no use for this process until then. An error: it is gone.
        self._control.setblocking(True)
        with suppress(OSError):
            self._control.send(json.dumps([key, end]).encode())
        self._control.setblocking(False)


class SpawnStarter:
    """Starts children as new interpreters with the parent's command line."""

    def __init__(self, loop: AbstractEventLoop, command: Sequence[str], on_end: OnEnd) -> None:
        self.loop = loop
        self.command = command
        self.on_end = on_end
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._check()

    @property
    def pids(self) -> list[int]:
        """The processes that it has to reap."""
        return [process.pid for process in self._children.values()]

    def start(self, key: str, channel: socket.socket) -> None:
        """Start a child, as by a fork."""
        environment = {**os.environ, CHANNEL_FD: f"{channel.fileno()} {os.getpid()}"}
        try:
            self._children[key] = subprocess.Popen(self.command, env=environment, pass_fds=[channel.fileno()])  # noqa: S603
        except OSError as error:
            self.on_end(key, str(error))

    def kill(self, key: str) -> None:
        """Kill a child, if it has not ended."""
        # Popen compares the exit status first, so the number does not belong to another process by now.
        if key in self._children:
            self._children[key].kill()

    def close(self) -> None:
        """Kill all children."""
        for process in self._children.values():
            process.kill()
            process.wait()

    def _check(self) -> None:
        """Tell the ends of children. SIGCHLD wakes the loop, and the loop never sleeps for longer than a second."""
        for key, process in list(self._children.items()):
            if (code := process.poll()) is not None:
                del self._children[key]
                self.on_end(key, code)
        self.loop.call_later(0.1, self._check)


Starter = ForkStarter | SpawnStarter


def channel_of_spawned() -> socket.socket | None:
    """Return the channel of a child that is a new interpreter; None: this process is no such child."""
    given = os.environ.pop(CHANNEL_FD, None)
    if given is None:
        return None
    descriptor, parent = map(int, given.split())
    die_with_parent(parent)
    # Processes that tasks start do not inherit it.
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


def run_to_end(main: Callable[[], int]) -> None:
    """Run the main function of a process, and end the process: Python would wait for threads that tasks have left."""
    code = FAILED
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else FAILED
    except BaseException:  # noqa: BLE001 - it would reach the code that has forked
        with suppress(Exception):
            sys.excepthook(*sys.exc_info())
    finally:
        _flush_output()
        os._exit(code)


def _flush_output() -> None:
    """Write what was printed: ``os._exit()`` does not, and a fork would write it twice."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def refuse_platform() -> None:
    """Raise ``ConfigurationError`` on a system without what a parent needs."""
    if not hasattr(socket, "AF_UNIX") or os.name != "posix":
        raise ConfigurationError("A worker needs Unix sockets and signals, which this system does not have.")
