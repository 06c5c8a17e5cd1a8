"""Children of a parent without processes: the test is the starter, and speaks for each child."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from django_pglock.worker.channel import Channel, new_loop
from django_pglock.worker.parent.crew import Crew
from tests.conftest import NEVER


class FakeStarter:
    """Keeps the children's ends. ``refuses`` is how many of the next starts fail."""

    def __init__(self) -> None:
        self.ends: list[Channel] = []
        self.killed: list[str] = []
        self.refuses = 0
        self.on_end: Any = None

    def start(self, key: str, channel: Any) -> None:
        if self.refuses:
            self.refuses -= 1
            self.on_end(key, "no more processes")
            return
        self.ends.append(Channel(channel.dup()))
        # The process of the test is running, as far as the system tells.
        self.ends[-1].send(ready=[os.getpid(), []])

    def kill(self, key: str) -> None:
        self.killed.append(key)


class Observed(Crew):
    """Children without heartbeat and upkeep, whose loop runs until something is true."""

    fake: FakeStarter
    services = ()

    def until(self, is_true: Any) -> Any:
        deadline = time.monotonic() + NEVER
        while not (value := is_true()):
            assert time.monotonic() < deadline, "it never came true"
            self.loop.call_later(0.001, self.loop.stop)
            self.loop.run_forever()
            self.check()
        return value

    def turn(self) -> None:
        """Let the loop do all that is due, and one check of the children."""
        done: list[int] = []
        self.loop.call_later(0.03, lambda: done.append(1))
        self.until(lambda: done)

    def lose(self, code: int, place: int = 0) -> None:
        """Let a child end."""
        self.note_end(self.all[place].id.hex, code)

    def tell(self, child: int = 0, **message: Any) -> None:  # type: ignore[override]
        """Say something as a child."""
        self.fake.ends[child].send(**message)
        self.turn()

    def heard_by(self, child: int = 0) -> list[dict[str, Any]]:
        return list(self.fake.ends[child].receive())


@pytest.fixture
def make():
    made: list[Observed] = []

    def make(count: int = 1, **options: Any) -> Observed:
        given = {"using": "default", "grace": 0.0, "drain": False, "threads": 1, "queues_given": [], **options}
        children = Observed(new_loop(), fake := FakeStarter(), given, first=1, count=count)
        children.fake = fake
        fake.on_end = children.note_end
        made.append(children)
        children.start()
        children.turn()
        return children

    yield make
    for children in made:
        for each in (*children.fake.ends, *(child.channel for child in children.all)):
            each.close()
        children.heartbeat._waker.close()
        children.loop.close()
