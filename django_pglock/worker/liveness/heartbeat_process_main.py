"""The guard of a worker: a small process that speaks for it while a task keeps all of its threads from running.

A task that holds Python's GIL for a minute stops the heartbeat, which is a thread, and yet the worker lives. So the
worker tells its guard of each beat. When one is late and the worker's process is neither gone nor stopped, the guard
beats in its place, over a connection that it opens for that. Until then it has none.

When the worker's process has died, the guard deletes the worker's row. A worker without a row is dead, so its tasks are
rescued in the next round of upkeep. This needs no session lock, so it is right behind a pooler as well.

It runs as a script, with nothing but the standard library and, once it has to speak, psycopg.
``heartbeat_process.py`` starts it and says what it has to know: lines of JSON on its standard input, an empty line for
each beat, and ``END`` when the worker ends in order. The input of a worker that dies ends without ``END``.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from typing import Any, NoReturn

#: A beat is late after so many intervals. Rescue begins to suspect a worker after 2.2 of them.
LATE = 1.5
#: Seconds for which the guard speaks at most before the worker has to show life by itself again: what has kept its
#: threads from running for so long will not end, and its tasks are better run elsewhere.
LONGEST = 3600.0
#: Seconds for one beat, the opening of a connection not counted. A network that swallows it must not keep the guard.
WRITTEN_WITHIN = 5.0
HAS_PROC = os.path.exists("/proc/self/stat")
#: States of processes that do not run: stopped by a signal or a debugger, ended, or about to be.
NOT_RUNNING = "TtZXx"
#: Only for the transaction, so it is right behind a pooler as well.
SET = "SELECT set_config(%s, %s, true)"
#: The last line of a worker that ends in order: it deletes its row itself.
END = b"end"
#: Seconds after the end of the input in which the worker's process has to be gone, if it has died.
DIES_WITHIN = 1.0
#: Seconds between two looks for that.
BETWEEN_LOOKS = 0.01
#: Only the dates, and only of a row that is there: a worker that signed off stays away. The guard speaks because a beat
#: is late, maybe after an outage: so the beats are not continuous, and the worker is no witness of who is silent.
BEAT = "UPDATE {table} SET heartbeat_at = clock_timestamp(), beating_since = clock_timestamp() WHERE id = %s"
DEPART = "DELETE FROM {table} WHERE id = %s"


def is_running(pid: int) -> bool:
    """Say whether a process is there, and neither stopped nor ended."""
    state = _state_of(pid)
    return bool(state) and state[0] not in NOT_RUNNING


def _state_of(pid: int) -> str:
    if HAS_PROC:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as status:
            # The name before it stands in brackets, and may contain some itself.
            return status.read().rpartition(")")[2].split()[0]
        return ""
    import subprocess  # only here: it is large

    command = ["/bin/ps", "-o", "state=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()  # noqa: S603


class Voice:
    """Writes the beats of a worker that cannot do it by itself."""

    def __init__(self) -> None:
        self.orders: dict[str, Any] = {}
        self._connection: Any = None
        self._since: float | None = None

    def speak(self) -> None:
        """Write one beat, unless this has gone on for too long. A failure is said once, and tried again next time."""
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
                say(f"cannot reach the database: {' '.join(str(error).split())}")

    def fall_silent(self) -> None:
        """The worker speaks for itself again."""
        self._since = None
        self._close()

    def report_death(self) -> None:
        """Delete the worker's row. Tries for ``limit`` seconds: after that the missing heartbeat tells the same."""
        deadline = time.monotonic() + self.orders["limit"]
        while not self._has_written(DEPART) and time.monotonic() < deadline:
            time.sleep(min(1.0, self.orders["interval"]))

    def _has_written(self, statement: str) -> bool:
        try:
            self._write(statement)
        except Exception:  # noqa: BLE001 - psycopg's, if it could be imported
            self._close()
            return False
        return True

    def _write(self, statement: str) -> None:
        import psycopg  # only here: its memory is needed as seldom as a connection

        orders = self.orders
        if self._connection is None:
            self._connection = psycopg.connect(**orders["connection"])
        deadline = threading.Timer(WRITTEN_WITHIN, shut, (self._connection.fileno(),))
        deadline.start()
        try:
            with self._connection.transaction():
                for setting in orders["session"].items():
                    self._connection.execute(SET, setting)
                self._connection.execute(statement.format(table=orders["table"]), (orders["worker"],))
        finally:
            deadline.cancel()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def shut(descriptor: int) -> None:
    """End a connection under whoever waits for its answer."""
    import socket

    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as other:
        other.shutdown(socket.SHUT_RDWR)


def say(text: str) -> None:
    """Write a line where the worker's log usually goes."""
    with contextlib.suppress(OSError, ValueError):
        print(f"django_pglock guard of worker process {os.getppid()}: {text}", file=sys.stderr, flush=True)  # noqa: T201


def listen(lines: queue.SimpleQueue[bytes]) -> None:
    """Pass on what the worker says, at last the end of the input as an empty text.

    When the worker has ended in order, end at once, whatever the main thread is waiting for.
    """
    with contextlib.suppress(OSError):
        for line in sys.stdin.buffer:
            if line.strip() == END:
                os._exit(0)
            lines.put(line)
    lines.put(b"")


def has_died(pid: int) -> bool:
    """Say whether our parent, a process that has closed its end of the input, dies."""
    deadline = time.monotonic() + DIES_WITHIN
    while os.getppid() == pid and time.monotonic() < deadline:
        # The kernel closes what a process had open before it gives the process's children another parent.
        time.sleep(BETWEEN_LOOKS)
    return os.getppid() != pid


def end_after_death(voice: Voice) -> NoReturn:
    """Report the death of the worker, and end."""
    # Whoever reads the worker's log until its end must not wait for us.
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    voice.report_death()
    os._exit(0)


def guard() -> None:
    """Watch over the process that has started this one."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(lines,), daemon=True).start()
    voice = Voice()
    patience: float | None = None
    while True:
        try:
            line = lines.get(timeout=patience)
        except queue.Empty:
            # A forked child of the worker may keep the socket open, so its end is not the only sign. Another parent is.
            if os.getppid() != voice.orders["worker_pid"]:
                end_after_death(voice)
            if is_running(voice.orders["worker_pid"]):
                voice.speak()
            patience = voice.orders["interval"]
            continue
        if not line:
            if voice.orders and has_died(voice.orders["worker_pid"]):
                end_after_death(voice)
            os._exit(0)
        if line.strip():
            voice.orders = json.loads(line)
            sys.path[:] = voice.orders["path"]
        voice.fall_silent()
        patience = voice.orders["interval"] * LATE


if __name__ == "__main__":
    guard()
