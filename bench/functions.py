"""Count the functions of the package, and all Python calls, in a warm process, of two things: a `with lock("a")`, and
a task without work in a child of one thread that sleeps: from the message that wakes it until the task is settled.

.venv/bin/python bench/functions.py [--names]
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.testbed import configure
from example_project.postgres import PrivatePostgres

OURS = "/django_pglock/"
SLEEP = 0.5


class Count:
    """Counts the calls of all threads that are started after it, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.ours: Counter[tuple[str, str]] = Counter()
        self.calls = 0
        sys.setprofile(self.trace)
        threading.setprofile(self.trace)

    def trace(self, frame, event, arg):
        if event == "call" and self.is_on:
            self.calls += 1
            # From Python 3.12 on, a comprehension is no function.
            if OURS in frame.f_code.co_filename and not frame.f_code.co_name.endswith("comp>"):
                name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from Python 3.11 on
                self.ours[frame.f_code.co_filename.partition(OURS)[2], name] += 1

    def passed(self, use: Callable[[], None]) -> None:
        self.ours, self.calls, self.is_on = Counter(), 0, True
        use()
        self.is_on = False

    def show(self, what: str, *, names: bool) -> None:
        files = {file for file, _ in self.ours}
        calls = f"{sum(self.ours.values())} calls; {self.calls} in all"
        print(f"{what}: {len(self.ours)} functions in {len(files)} files, {calls}")
        for (file, name), count in sorted(self.ours.items()) if names else ():
            print(f"{count:4} {file} {name}")


def prepare(folder: str) -> None:
    """Set Django up, and make the tables."""
    from django.core.management import call_command

    configure(folder, "bench.app")
    call_command("migrate", verbosity=0)


class SleepingChild:
    """A child of one thread, whose parent is this process."""

    def __init__(self) -> None:
        from django_pglock.worker.channel import Channel
        from django_pglock.worker.child.child import Child

        self.channel, theirs = (Channel(end) for end in socket.socketpair())
        options = {"id": str(uuid4()), "number": 1, "using": "default", "backend": None, "queues": [], "exclude": []}
        options |= {"threads": 1, "grace": 1, "drain": False, "max_tasks": None, "max_memory": None}
        self.child = Child(theirs, options)
        self.thread = threading.Thread(target=self.child.run)
        self.thread.start()

    def fall_asleep(self) -> None:
        self.channel.send(beat=[time.monotonic(), True, True])
        time.sleep(SLEEP)

    def run_one(self) -> None:
        """Wake it for a task, and wait until the task is settled."""
        in_flight = self.child.in_flight
        before = in_flight.changed_at
        self.channel.send(wake=["default", 0])
        while in_flight.claims or in_flight.changed_at == before:
            time.sleep(0.0005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="name each function")
    names = parser.parse_args().names
    count = Count()
    with PrivatePostgres() as postgres:
        prepare(str(postgres.folder))
        from django_pglock import lock

        def use() -> None:
            with lock("a"):
                pass

        for _ in range(3):
            use()
        count.passed(use)
        count.show('with lock("a")', names=names)

        from bench.app.tasks import nothing

        asleep = SleepingChild()
        for _ in range(4):
            asleep.fall_asleep()
            nothing.enqueue()
            count.passed(asleep.run_one)
        count.show("wake, claim, run, settle", names=names)
        asleep.child.stop()
        asleep.thread.join()


main()
