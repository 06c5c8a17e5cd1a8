"""Runs a function with steps in memory: again from each of its steps, as after a deploy, and compares the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Generic, NoReturn, TypeVar

from asgiref.sync import async_to_sync
from django.utils.asyncio import async_unsafe

from django_pglock.errors import PGLockError, StepError
from django_pglock.tasks.arguments import from_json, to_json
from django_pglock.tasks.claim import context_of
from django_pglock.tasks.compat import Task
from django_pglock.tasks.fields import TaskFields
from django_pglock.tasks.retry import MAX_DELAY
from django_pglock.tasks.step_records import HandedBack, Kind, Record, Suspension, TaskCall, told
from django_pglock.tasks.steps import Chunk, Steps

R = TypeVar("R")

WHY = "Read clocks, random numbers and rows inside of a step, whose result is the same in each run."


@dataclass(frozen=True)
class StepsRun(Generic[R]):
    """What ``run_steps()`` has seen: the return value, and what each step has returned, by their names in order.

    What a failed step, or a wait whose event has not come, has returned is None.
    """

    return_value: R
    steps: dict[str, Any]


@dataclass
class Story:
    """What all runs of the function have in common."""

    events: Mapping[str, Any]
    fail: Mapping[str, BaseException]
    interrupt_after: str | None
    records: dict[str, Record] = field(default_factory=dict)
    #: The names of the steps in the order of their calls, and their arguments.
    names: list[str] = field(default_factory=list)
    arguments: dict[str, dict[Any, Any]] = field(default_factory=dict)

    def check_names(self) -> None:
        """Raise ``ValueError`` for the name of a step that the function has not called."""
        for name in filter(None, (*self.fail, self.interrupt_after)):
            if name not in self.names:
                raise ValueError(f"There is no step {name!r}. The function has called {self.names}.")


@async_unsafe("run_steps() blocks the event loop here. Write: await sync_to_async(run_steps)(…)")
def run_steps(
    task: Task[..., R],
    /,
    *args: Any,
    events: Mapping[str, Any] | None = None,
    fail: Mapping[str, Exception] | None = None,
    interrupt_after: str | None = None,
    **kwargs: Any,
) -> StepsRun[R]:
    """Call a function with steps in memory, with these arguments, and check that it may be interrupted anywhere.

    The function is left after each step and called again, as after a deploy, a sleep, or the death of a worker. The
    functions of the steps are called once, and so are those of children. Nothing is enqueued, recorded or waited for.
    So it works in each test, also without a database, if the functions need none.

    - ``events``: payloads by the names of events. Another event does not come, so ``EventTimeout`` is raised.
    - ``fail``: exceptions by the names of steps. Such a step is not called. It has spent its attempts, so
      ``StepFailed`` is raised.
    - ``interrupt_after``: leave the function only after the step of this name, and where it sleeps or waits.

    Raises what the function or a step raises. Raises ``AssertionError`` if two runs differ: in the names or the order
    of the steps, in the arguments of a step, or in the return value. Then the function depends on something that it
    has not got from a step, such as a clock, a random number or a row. Raises ``StepError`` where a worker does.
    """
    definition: Any = task
    if not isinstance(definition, TaskFields) or not definition.takes_context or definition.atomic or definition.group:
        text = "cannot have steps. It needs our backend, takes_context=True, and neither atomic nor group."
        raise StepError(f"{task.module_path} {text}")
    story = Story(events or {}, fail or {}, interrupt_after)
    function: Any = async_to_sync(task.func) if iscoroutinefunction(task.func) else task.func
    context, args_text, kwargs_text = context_of(definition, args, kwargs), to_json(list(args)), to_json(kwargs)
    returned: list[str] = []
    while len(returned) < 2:
        steps = Rehearsal(story)
        call = partial(function, replace(context, _steps=steps), *from_json(args_text), **from_json(kwargs_text))
        returned += _returned_by(call, steps)
    if returned[0] != returned[1]:
        raise AssertionError(f"The function has returned {returned[0]}, and then {returned[1]}. {WHY}")
    story.check_names()
    return StepsRun(from_json(returned[0]), {name: steps.result_of(each) for name, each in story.records.items()})


def _returned_by(call: Callable[[], Any], steps: Steps) -> list[str]:
    """Call the function. Return what it has returned, and nothing if it was interrupted."""
    try:
        value = call()
        steps.finish()
    except BaseException as error:  # noqa: BLE001 - a step may leave the function in any way
        left = steps.what_left(error)
        if isinstance(left, (HandedBack, Suspension)):
            return []
        raise left  # noqa: B904 - it keeps its cause
    return [to_json(value, what="The return value")]


class Rehearsal(Steps):
    """The steps of one run."""

    def __init__(self, story: Story) -> None:
        super().__init__(story.records)
        self.story = story
        self._place = 0
        #: The last step that this run has recorded.
        self._new: str | None = None

    def step(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a part of the function once, or let it fail."""
        self._compare_arguments(name, args, kwargs)
        return super().step(name, self._planned(name, function), *args, **kwargs)

    async def astep(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do the same for a coroutine function."""
        self._compare_arguments(name, args, kwargs)
        return await super().astep(name, self._planned(name, function), *args, **kwargs)

    def _planned(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def fails(*args: Any, **kwargs: Any) -> NoReturn:
            raise self.story.fail[name]

        return fails if name in self.story.fail else function

    def failure_of(self, error: Exception) -> dict[str, str]:
        """Record a failure that the test has planned. Each other one is for the test."""
        return told(error) if any(error is each for each in self.story.fail.values()) else super().failure_of(error)

    def _compare_arguments(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        here = {each: _comparable(value) for each, value in given.items()}
        there = self.story.arguments.setdefault(name, here)
        for each in here.keys() | there.keys():
            if here.get(each) != there.get(each):
                values = f"{there.get(each)!r}, and now {here.get(each)!r}"
                self._differ(f"The argument {each!r} of the step {name!r} was {values}")

    def begin(self, name: str, kind: Kind, *, blocks: bool = False) -> Record | None:
        """Note that the function has come to a step, and check that it is the one of the earlier runs."""
        expected = self._next_name(name)
        if expected is None:
            self.story.names.append(name)
        elif expected != name:
            self._differ(f"The function calls the step {name!r} where an earlier run has called {expected!r}")
        self._place += 1
        return super().begin(name, kind, blocks=blocks)

    def finish(self) -> None:
        """Check that the function may end now, and that it has called all steps."""
        super().finish()
        if (expected := self._next_name()) is not None:
            self._differ(f"The function returns where an earlier run has called the step {expected!r}")

    def _next_name(self, name: str = "") -> str | None:
        """Return the step that the earlier runs have called here. One for which this run has asked may be left out."""
        names = self.story.names
        while self._place < len(names) and names[self._place] != name and names[self._place] in self._asked:
            self._place += 1
        return names[self._place] if self._place < len(names) else None

    def _differ(self, how: str) -> NoReturn:
        self.end(AssertionError(f"{how}. {WHY}"))

    def check(self, name: str, *, blocks: bool) -> None:
        """Leave the function before a new step, if it is to be interrupted after the last one."""
        if self._new is not None and self.story.interrupt_after in (None, self._new):
            self.leave(HandedBack())

    def record(self, name: str, value: Any, failure: dict[str, str] | None, kind: Kind = Kind.STEP) -> None:
        """Record how a step has ended."""
        super().record(name, value, failure, kind)
        self._new = name

    def note_position(self, chunk: Chunk) -> None:
        """Note that the loop has done with these rows."""
        super().note_position(chunk)
        self._new = chunk.name

    def suspend(self, name: str, kind: Kind, **until: Any) -> NoReturn:
        """Leave the function. When it is called again, the time is over, the event is there, or the children."""
        event = until.get("event")
        record = self.records[name] = Record(self.next_number, kind.value, until.get("calls"))
        if event is not None and event in self.story.events:
            record.result = from_json(to_json(self.story.events[event], what=f"The payload of the event {event!r}"))
        elif event is not None and until["seconds"] >= MAX_DELAY:
            self.end(StepError(f"{name!r} waits without end for {event!r}. Give events={{{event!r}: its payload}}."))
        elif event is not None:
            record.failure = {}
        super().suspend(name, kind, **until)

    def prepare(self, name: str, calls: Iterable[TaskCall[Any]]) -> list[Any]:
        """Call the functions of the children here, one after the other, and return their results."""
        return [call.here() for call in self.checked(name, calls)]

    def result_of(self, record: Record) -> Any:
        """Return what the function has got for a record; None for a failure."""
        return self.results_of(record) if record.kind == Kind.CHILDREN else record.result

    def results_of(self, record: Record) -> list[Any]:
        """Return the results of the children; a record without children has no list."""
        return record.result if isinstance(record.result, list) else []


def _comparable(value: Any) -> Any:
    """Return a copy of a value for a comparison. Objects without a comparison are compared by their classes."""
    try:
        return to_json(value)
    except PGLockError:
        kind: Any = type(value)
        return kind if kind.__eq__ is object.__eq__ else value
