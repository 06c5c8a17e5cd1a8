"""The demo's processes: the shop's server and the workers. None outlives the demo."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MANAGE = Path(__file__).resolve().parent.parent.parent / "manage.py"
#: Linux: the option by which the kernel signals a process when its parent ends for any reason.
PR_SET_PDEATHSIG = 1


class Fleet:
    """Starts commands of manage.py and stops them all."""

    #: Starts a process.
    open: Callable[..., subprocess.Popen[bytes]] = staticmethod(subprocess.Popen)

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = {**os.environ, **environment}
        self.started: list[subprocess.Popen[bytes]] = []
        self.log = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 - closed by stop()
        # All processes inherit this file as their output. The lock of the file ends when the last of them has ended.
        self._output = Path(self.log.name).open("ab")  # noqa: SIM115 - closed by stop()
        # Without a name the file ends with its last process, also if the demo is killed.
        Path(self.log.name).unlink()
        fcntl.flock(self._output, fcntl.LOCK_EX)

    def start(self, *arguments: str, pass_fds: Sequence[int] = (), **environment: str) -> subprocess.Popen[bytes]:
        """Start ``manage.py`` with these arguments."""
        return self.run([sys.executable, str(MANAGE), *arguments], pass_fds=pass_fds, **environment)

    def run(
        self, command: Sequence[str], *, pass_fds: Sequence[int] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a program in the folder of ``manage.py``. It inherits the descriptors ``pass_fds``."""
        with ctrl_c_later():
            process = self.open(
                command,
                cwd=MANAGE.parent,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=pass_fds,
                # Ctrl-C goes to the demo alone, which then stops the others in order.
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # one system call
            )
            self.started.append(process)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Stop one process, and wait for its end."""
        process.terminate()
        process.wait()
        self.started.remove(process)

    def stop(self) -> None:
        """Stop all: first by SIGTERM, then by SIGKILL."""
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        for process in self.started:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._wait_for_their_children()
        self.log.close()

    def _wait_for_their_children(self) -> None:
        """Wait for the children of a worker that was killed: the kernel ends them a moment later."""
        self._output.close()
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            try:
                fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                return

    def output(self) -> str:
        """Return the end of what the processes have written."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-4000:]

    def require_running(self, process: subprocess.Popen[bytes]) -> None:
        """Raise ``RuntimeError`` with the log if a process has ended."""
        if process.poll() is not None:
            raise RuntimeError(f"A process of the demo ended with {process.returncode}:\n{self.output()}")


@contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the block instead of anywhere in it.

    With ``preexec_fn`` Python calls hooks of other modules before and after the fork, and ignores exceptions in them:
    the KeyboardInterrupt would be lost there, and the lock of logging could stay held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # a KeyboardInterrupt is raised in the main thread only
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def listen(wanted: int = 8000, *, backlog: int = 256) -> socket.socket:
    """Return a socket that listens on loopback: on the wanted port if it is free, else on any.

    It is passed on to the server, so that no other program can take the port meanwhile.
    """
    for port in (wanted, 0):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(backlog)
        except OSError:
            listener.close()
            continue
        return listener
    raise RuntimeError("No port is free on 127.0.0.1.")


def free_port() -> int:
    """Return a port that is free on loopback at this moment, for a server that opens it itself.

    It is below the ports that operating systems choose for outgoing connections, so none of them takes it meanwhile.
    """
    for _ in range(100):
        port = random.randrange(10_000, 32_000)
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("No port is free on 127.0.0.1.")
