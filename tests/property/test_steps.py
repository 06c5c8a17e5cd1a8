"""A random function of steps, sleeps, events, loops and children, interrupted anywhere, ends as without interruptions.

It is interrupted by an error, by the death of its process, and by a deploy, before and after each statement and each
line of the function. A step may be repeated then, and an atomic one never.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from django.db import OperationalError, connection
from hypothesis import given, settings
from hypothesis import strategies as st

from django_pglock import emit
from django_pglock.models import Event, Step, Task, Waiter
from django_pglock.postgres.stopping import current_attempt
from django_pglock.store.admit import admit, blocked_keys
from django_pglock.store.release import orphaned_waiters, release
from django_pglock.store.rescue import rescue
from django_pglock.store.steps import missed_events, wake_waiting
from django_pglock.testing import run_tasks
from django_pglock.testing import tasks as testing
from tests.property.simulation import LONG
from tests.sample import walking_tasks as sample
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

#: The rows from which ``chunks`` copies.
ROWS = 7


class Death(BaseException):
    """The process is killed."""


@dataclass
class Plan:
    """When something happens: at which of the points that the walk passes, in all of its runs together."""

    faults: dict[int, str]
    point: int = 0
    is_dead: bool = False
    #: How often which kind of fault has happened.
    met: Counter[str] = field(default_factory=Counter)
    stopping: list[Any] = field(default_factory=list)

    def pass_point(self) -> None:
        if self.is_dead:
            return
        fault = self.faults.get(self.point, "")
        self.point += 1
        attempt = current_attempt.get()
        self.met[fault] += 1
        if fault == "death":
            self.is_dead = True
            raise Death
        if attempt is None:
            # A statement of the worker. What it does after an error is tested elsewhere.
            return
        if fault == "error":
            raise OperationalError("an error")
        if fault == "deploy":
            self.stopping.append(attempt.runner.watchdog)
            self.stopping[-1].is_stopping = True

    def around_statement(self, execute: Any, *values: Any) -> Any:
        self.pass_point()
        result = execute(*values)
        self.pass_point()
        return result

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Let it happen in the block."""
        self.is_dead = False

        def execute(claim: Any, *values: Any) -> Any:
            try:
                return run(claim, *values)
            finally:
                for watchdog in self.stopping:
                    # A new process continues.
                    watchdog.is_stopping = False
                if self.is_dead:
                    raise Death

        run = testing.execute
        with (
            patch.object(sample, "HOOK", self.pass_point),
            patch.object(testing, "execute", execute),
            connection.execute_wrapper(self.around_statement),
            contextlib.suppress(Death),
        ):
            yield


def keep_up() -> None:
    """Do what the upkeep of another worker does."""
    rescue("default", unbroken=math.inf)
    wake_waiting("default", [event for event, is_there in missed_events("default", "") if is_there])
    release("default", [awaited for _, awaited in orphaned_waiters("default", 0) if awaited is not None])
    admit("default", blocked_keys("default", ""))


def walk(parts: list[Any], faults: dict[int, str], function: Any) -> Plan:
    plan = Plan(faults)
    for model in (Task, Step, Event, Waiter, Effect):
        model.objects.all().delete()
    Effect.objects.bulk_create(Effect(name="from", number=number) for number in range(ROWS))
    comes = {f"event {part[1]}": part[2] for part in parts if part[0] == "wait"}
    for event in (event for event, when in comes.items() if when == "before"):
        emit(event, event)
    function.enqueue(parts)
    for _ in range(100):
        with plan.followed():
            run_tasks(until="due")
        keep_up()
        if not Task.objects.filter(status__in=("READY", "RUNNING", "SCHEDULED", "BLOCKED")).exists():
            return plan
        later = Step.objects.filter(finished_at=None, event__in=[event for event in comes if comes[event] == "later"])
        if event := later.values_list("event", flat=True).first():
            emit(event, event)
        elif not Task.objects.filter(status="READY").exists():
            with plan.followed():
                run_tasks()
    raise AssertionError(f"It does not end: {list(Task.objects.values())}, {list(Step.objects.values())}")


def expected(parts: list[Any]) -> tuple[list[Any], Counter[tuple[str, int]], Counter[tuple[str, int]]]:
    """Return what the function returns, the effects that happen once, and those that may be repeated."""
    seen, once, others = [], Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for kind, number, *values in parts:
        if kind in ("step", "asked", "atomic"):
            seen.append(number)
            (once if kind == "atomic" else others)[kind, number] += 1
        elif kind == "failing":
            seen.append("builtins.LookupError")
            others[kind, number] += 1
        elif kind == "wait":
            seen.append(f"event {number}")
        elif kind == "gather":
            seen.append(list(range(values[0])))
            others.update(("child", each) for each in range(values[0]))
        else:
            seen.append(None)
        if kind == "chunks":
            size, is_atomic, end = values
            copied = next((first for first in range(0, ROWS, size) if first >= end), ROWS)
            (once if is_atomic else others).update((f"to {number}", each) for each in range(copied))
    return seen, once, others


def judge(parts: list[Any], plan: Plan) -> None:
    seen, once, others = expected(parts)
    parent = Task.objects.exclude(task_path=sample.child.module_path).get()
    assert parent.status == "SUCCESSFUL", parent.failures.values_list("traceback", flat=True)
    assert parent.result == seen
    effects = Counter(Effect.objects.exclude(name="from").values_list("name", "number"))
    assert {each: effects[each] for each in once} == once
    assert effects.keys() == once.keys() | others.keys()
    faults = plan.met["error"] + plan.met["death"]
    # A list of rows that is not a transaction is repeated as a whole.
    assert sum((effects - once - others).values()) <= faults * ROWS
    assert not Step.objects.filter(finished_at=None, kind__in=("STEP", "EVENT", "CHILDREN")).exists()
    assert not Task.objects.exclude(status="SUCCESSFUL").exists()


NUMBERED = st.sampled_from(["step", "atomic", "failing", "asked", "sleep"]).map(lambda kind: [kind])
WAITS = st.sampled_from(["before", "later", "never"]).map(lambda comes: ["wait", comes])
LOOPS = st.builds(
    lambda size, is_atomic, end: ["chunks", size, is_atomic, end], st.integers(1, 4), st.booleans(), st.integers(0, 9)
)
GATHERS = st.integers(0, 3).map(lambda count: ["gather", count])
FAULTS = st.dictionaries(st.integers(0, 60), st.sampled_from(["error", "death", "deploy"]), max_size=8)


def numbered(parts: list[Any]) -> list[Any]:
    return [[kind, number, *values] for number, (kind, *values) in enumerate(parts)]


@given(st.lists(st.one_of(NUMBERED, WAITS, LOOPS, GATHERS), max_size=6).map(numbered), FAULTS)
@settings(max_examples=LONG or 40)
def test_an_interrupted_function_ends_as_without_interruptions(parts, faults):
    judge(parts, walk(parts, faults, sample.walk))


@given(st.lists(st.one_of(st.just(["step"]), st.just(["sleep"]), WAITS, GATHERS), max_size=5).map(numbered), FAULTS)
@settings(max_examples=LONG or 15)
def test_an_interrupted_coroutine_ends_as_without_interruptions(parts, faults):
    judge(parts, walk(parts, faults, sample.awalk))
