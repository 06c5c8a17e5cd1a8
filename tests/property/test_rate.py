"""``rate=``, whatever the order of calls, claims, rounds of upkeep and pauses is.

The model knows no token: it has the date of each start. The server's clock is moved, so the test waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from django_pglock import enqueue_many
from django_pglock.models import RateLimit, Task
from django_pglock.store import rate
from django_pglock.store.admit import admit
from django_pglock.store.outcome import Succeeded
from django_pglock.store.settle import settle
from django_pglock.tasks.options import Rate
from tests import server_clock
from tests.property.simulation import LONG, claim
from tests.sample import keyed_tasks as keyed

pytestmark = pytest.mark.django_db(transaction=True)

PER = 3600.0
#: The test itself takes time.
TOLERANCE = 60.0
RATES = [
    (Rate(4, per=PER, key="{tenant}"), None),
    (Rate(6, per=PER, key="{tenant}", burst=3), None),
    (Rate(6, per=PER, burst=3), "tenant:{tenant}"),
]


@dataclass
class Run:
    """What has happened, by a clock that only ``wait`` moves."""

    rate: Rate
    task: Any
    now: float = 0.0
    enqueued: int = 0
    starts: list[float] = field(default_factory=list)

    def enqueue(self, count: int) -> None:
        enqueue_many(self.task, ["a"] * count) if count > 1 else self.task.enqueue("a")
        self.enqueued += count

    def start(self, limit: int) -> None:
        """Do what a worker does: claim, settle, and admit the next ones."""
        worker = uuid4()
        claims = claim(worker, limit, [self.task.module_path])
        rate.note_starts("default", claims)
        self.starts += [self.now] * len(claims)
        settle("default", [(each, Succeeded()) for each in claims], worker)
        admit("default", {each.lock_key for each in claims})

    def look(self, _: int) -> None:
        """Do a round of upkeep."""
        admit("default", rate.open_rates("default"))

    def wait(self, intervals: float) -> None:
        seconds = intervals * self.rate.interval
        server_clock.put_back(-seconds)
        self.now += seconds

    def judge(self) -> None:
        most = self.rate.count + self.rate.burst - 1
        for start in self.starts:
            assert sum(start <= each < start + PER - TOLERANCE for each in self.starts) <= most, "in one period"
            assert self.starts.count(start) <= self.rate.portion, "at once"


STEPS = st.one_of(
    st.tuples(st.just("enqueue"), st.integers(1, 4)),
    st.tuples(st.just("start"), st.integers(1, 8)),
    st.tuples(st.just("look"), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 1.0, 1.5, 3.0, 40.0])),
)


@settings(max_examples=LONG or 12, deadline=None)
@given(kind=st.sampled_from(RATES), steps=st.lists(STEPS, min_size=4, max_size=15))
@example(kind=RATES[1], steps=[("enqueue", 3), ("wait", 40.0), ("enqueue", 8), ("start", 8), ("start", 8)])
@example(kind=RATES[1], steps=[("enqueue", 3), ("wait", 40.0), ("start", 8), ("enqueue", 8), ("start", 8)])
def check(kind, steps):
    Task.objects.all().delete()
    RateLimit.objects.all().delete()
    chosen, lock = kind
    run = Run(chosen, keyed.trickle.using(rate=chosen, lock=lock))
    for name, value in steps:
        getattr(run, name)(value)
    run.judge()
    for _ in range(run.enqueued + 1):
        run.wait(1.0)
        run.look(0)
        run.start(8)
    assert len(run.starts) == run.enqueued, "a call waits without end"
    run.judge()


def test_no_period_has_more_starts_than_its_rate_says_and_no_call_waits_without_end():
    check()
