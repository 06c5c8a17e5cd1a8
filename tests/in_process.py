"""A worker whose parent and child are threads of the process of the tests, which can look into both."""

from __future__ import annotations

import socket
import threading
import time
from asyncio import AbstractEventLoop
from typing import Any

from django_pglock.worker import Worker
from django_pglock.worker.channel import Channel
from django_pglock.worker.child.child import Child

NEVER = 60.0


class InProcessChild(Child):
    """A child that does not end the process."""

    def leave(self) -> None:
        self.have_all_finished = False
        self.loop.remove_reader(self.channel.fileno())
        self.end()


class ThreadStarter:
    """Starts each child as a thread."""

    pids = ()

    def __init__(self, loop: AbstractEventLoop, run_child: Any, command: Any, on_end: Any, on_lost: Any) -> None:
        self.loop = loop
        self.on_end = on_end
        self.children: list[InProcessChild] = []
        self._threads: list[threading.Thread] = []

    def start(self, key: str, channel: socket.socket) -> None:
        end = Channel(channel.dup())
        # The first one. The heartbeat may have sent others already.
        message = next(end.receive())
        child = InProcessChild(end, message["start"])
        self.children.append(child)

        def run() -> None:
            code = child.run()
            end.flush()
            end.close()
            self.loop.call_soon_threadsafe(self.on_end, key, code)

        thread = threading.Thread(target=run, name="lockworker-child", daemon=True)
        self._threads.append(thread)
        thread.start()

    def kill(self, key: str) -> None:
        """Kill nothing: the child would be this process."""

    def close(self) -> None:
        for thread in self._threads:
            thread.join(5)


class InProcessWorker(Worker):
    """A worker in threads. ``start()`` returns when the child claims tasks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._thread = threading.Thread(target=self._run_in_thread, name="lockworker-parent", daemon=True)
        self._starter: ThreadStarter | None = None
        self.is_ok = True

    def make_starter(self, *args: Any, **options: Any) -> ThreadStarter:  # type: ignore[override]
        self._starter = ThreadStarter(*args, **options)
        return self._starter

    def _run_in_thread(self) -> None:
        self.is_ok = self.run()

    @property
    def crew(self) -> Any:
        return self.crews[0]

    @property
    def child(self) -> InProcessChild:
        """The child that was started last."""
        assert self._starter is not None
        return self._starter.children[-1]

    def __getattr__(self, name: str) -> Any:
        # The parts of the child and of the parent, by their names.
        if name in ("upkeep", "heartbeat"):
            return getattr(self.crew, name)
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.child, name)

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + NEVER
        while time.monotonic() < deadline and self._thread.is_alive():
            if self._starter is not None and self._starter.children and self.child._is_started:
                return
            time.sleep(0.002)

    def wait(self, timeout: float = NEVER) -> bool:
        """Wait for the end, for example of a worker that drains."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def shutdown(self) -> bool:
        if not self._stops:
            self.stop()
        self.wait()
        return self.child.have_all_finished

    def run_here(self) -> bool:
        """Start, and wait until the worker has drained."""
        self.start()
        self.wait()
        return self.child.have_all_finished
