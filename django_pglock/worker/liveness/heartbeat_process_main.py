"""The heartbeat process of a worker, child side: it beats while a task keeps all threads of the worker from running.

A task that holds Python's GIL for a minute stops the heartbeat, which is a thread, although the worker lives. So the
worker reports each beat to this process. If a beat is late, and the worker's process is neither dead nor stopped, this
process beats in the worker's place. It opens a connection only then.

When the worker's process has died, this process deletes the worker's row. A worker without a row is dead, so its tasks
are rescued in the next round of upkeep. This needs no session lock, so it works behind a pooler as well.

It runs as a script that imports only the standard library and, when it has to beat, psycopg. ``heartbeat_process.py``
is the parent side. It writes to the standard input of this process: lines with instructions, an empty line for each
beat, and ``END`` when the worker ends in order. If the worker dies, the input ends without ``END``.

Each worker starts this script, and it rarely has to beat. So at its start it imports only modules that are part of the
interpreter or written in C. With ``json``, ``threading``, ``queue``, ``contextlib`` and ``typing`` a start takes more
than twice the CPU time.
"""

from __future__ import annotations

import _thread
import os
import sys
import time

try:
    from _queue import Empty, SimpleQueue
except ImportError:  # another interpreter than CPython
    from queue import Empty, SimpleQueue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

#: Intervals after which a beat is late. A worker can count as dead after 2.2 intervals.
LATE = 1.5
#: The longest time in seconds for which this process beats in the worker's place. A task that keeps the worker's
#: threads from running for longer will probably not end, so the tasks of this worker should run elsewhere.
LONGEST = 3600.0
#: Seconds for one beat, without the time to connect. An interrupted network must not block this process.
WRITTEN_WITHIN = 5.0
HAS_PROC = os.path.exists("/proc/self/stat")
#: States of processes that do not run: stopped by a signal or a debugger, ended, or about to end.
NOT_RUNNING = "TtZXx"
#: Valid only for the transaction, so it works behind a pooler as well.
SET = "SELECT set_config(%s, %s, true)"
#: The last line from a worker that ends in order. It deletes its row itself.
END = b"end"
#: If the worker has died, its process no longer exists within this number of seconds after the end of the input.
DIES_WITHIN = 1.0
#: Seconds between two checks for that.
CHECK_INTERVAL = 0.01
#: Writes only the dates, and only into an existing row: a worker that has deleted its row must not get a row again.
#: This process beats because a beat is late, perhaps after an outage. So ``beating_since`` restarts, and the worker is
#: not a witness.
BEAT = "UPDATE {table} SET heartbeat_at = clock_timestamp(), beating_since = clock_timestamp() WHERE id = %s"
DELETE_ROW = "DELETE FROM {table} WHERE id = %s"


def is_running(pid: int) -> bool:
    """Return whether a process exists, and is neither stopped nor ended."""
    state = _state_of(pid)
    return bool(state) and state[0] not in NOT_RUNNING


def _state_of(pid: int) -> str:
    if HAS_PROC:
        try:
            with open(f"/proc/{pid}/stat") as status:
                # The state follows the name, which is in brackets and may contain brackets.
                return status.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""
    import subprocess  # only here: it is large

    command = ["/bin/ps", "-o", "state=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()  # noqa: S603


class SubstituteHeartbeat:
    """Writes the beats of a worker that cannot write them itself, and deletes the row of a worker that has died."""

    def __init__(self) -> None:
        self.interval = 0.0
        #: The process of the worker. 0: there are no instructions yet.
        self.worker_pid = 0
        self._instructions = b""
        self._connection: Any = None
        self._since: float | None = None

    def instruct(self, line: bytes) -> None:
        """Follow new instructions: the interval, the worker's process, and what is needed to write, as JSON."""
        interval, worker_pid, self._instructions = line.split(b" ", 2)
        self.interval, self.worker_pid = float(interval), int(worker_pid)

    def beat(self) -> None:
        """Write one beat, for ``LONGEST`` seconds at most. The first failure is logged. The next beat tries again."""
        now = time.monotonic()
        is_new = self._since is None
        self._since = self._since or now
        if now - self._since > LONGEST:
            self._close()
            return
        try:
            self._write(BEAT)
        except Exception as error:  # noqa: BLE001 - psycopg's, if it could be imported
            self._close()
            if is_new:
                log(f"cannot reach the database: {' '.join(str(error).split())}")

    def pause(self) -> None:
        """Stop beating, because the worker itself beats again."""
        self._since = None
        self._close()

    def report_death(self) -> None:
        """Delete the worker's row. Try for ``limit`` seconds: then the missing heartbeat has the same effect."""
        deadline = time.monotonic() + self._given()["limit"]
        while not self._has_written(DELETE_ROW) and time.monotonic() < deadline:
            time.sleep(min(1.0, self.interval))

    def _given(self) -> dict[str, Any]:
        import json  # only here, as what follows it

        given: dict[str, Any] = json.loads(self._instructions)
        sys.path[:] = given["path"]
        return given

    def _has_written(self, statement: str) -> bool:
        try:
            self._write(statement)
        except Exception:  # noqa: BLE001 - psycopg's, if it could be imported
            self._close()
            return False
        return True

    def _write(self, statement: str) -> None:
        given = self._given()
        import threading

        import psycopg  # only here, to save memory until it is needed

        if self._connection is None:
            self._connection = psycopg.connect(**given["connection"])
        deadline = threading.Timer(WRITTEN_WITHIN, shut, (self._connection.fileno(),))
        deadline.start()
        try:
            with self._connection.transaction():
                for setting in given["session"].items():
                    self._connection.execute(SET, setting)
                self._connection.execute(statement.format(table=given["table"]), (given["worker"],))
        finally:
            deadline.cancel()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def shut(descriptor: int) -> None:
    """Shut a connection down, so that the thread that waits for its answer gets an error."""
    import socket

    try:
        with socket.socket(fileno=os.dup(descriptor)) as other:
            other.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def log(text: str) -> None:
    """Write a line to standard error, where the worker's log usually is."""
    prefix = f"django_pglock heartbeat process of worker process {os.getppid()}"
    try:  # noqa: SIM105 - contextlib is not imported here
        print(f"{prefix}: {text}", file=sys.stderr, flush=True)  # noqa: T201
    except (OSError, ValueError):
        pass


def listen(lines: SimpleQueue[bytes]) -> None:
    """Pass on the lines from the worker, and an empty text at the end of the input.

    If the worker has ended in order, end this process at once, whatever the main thread waits for.
    """
    try:
        for line in sys.stdin.buffer:
            if line.strip() == END:
                os._exit(0)
            lines.put(line)
    except OSError:
        pass
    lines.put(b"")


def has_died(pid: int) -> bool:
    """Return whether our parent, which has closed its end of the input, dies."""
    deadline = time.monotonic() + DIES_WITHIN
    while os.getppid() == pid and time.monotonic() < deadline:
        # The kernel closes the files of a process before it gives the process's children another parent.
        time.sleep(CHECK_INTERVAL)
    return os.getppid() != pid


def end_after_death(substitute: SubstituteHeartbeat) -> NoReturn:
    """Report the death of the worker, and end."""
    # A program that reads the worker's standard error to its end must not wait for this process.
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    substitute.report_death()
    os._exit(0)


def main() -> None:
    """Watch the worker process that has started this one."""
    lines: SimpleQueue[bytes] = SimpleQueue()
    _thread.start_new_thread(listen, (lines,))
    substitute = SubstituteHeartbeat()
    timeout: float | None = None
    while True:
        try:
            line = lines.get(timeout=timeout)
        except Empty:
            # If the worker dies, a forked child of it may keep the socket open, and then the input does not end. But
            # this process then has another parent.
            if os.getppid() != substitute.worker_pid:
                end_after_death(substitute)
            if is_running(substitute.worker_pid):
                substitute.beat()
            timeout = substitute.interval
            continue
        if not line:
            if substitute.worker_pid and has_died(substitute.worker_pid):
                end_after_death(substitute)
            os._exit(0)
        if line.strip():
            substitute.instruct(line)
        substitute.pause()
        timeout = substitute.interval * LATE


if __name__ == "__main__":
    main()
