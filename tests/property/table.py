"""The table of a simulated worker: what it has to do, and the statements of ``store/`` about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

from django_pglock.store.outcome import SUCCEEDED, Abandoned, GivenBack, Outcome, Succeeded
from django_pglock.store.wake import NEGATIVE_TTL
from django_pglock.worker.child import in_flight
from django_pglock.worker.child.claimer import ASYNC, SYNC
from tests.property.interleaving import Schedule


@dataclass(eq=False)
class Call:
    """A task, and the claim of it."""

    id: int
    #: How long the function runs.
    seconds: float
    is_async: bool = False
    lock_key: str | None = None
    queue: str = "default"
    #: How many of its first claims are given back, because the thread has no connection.
    refusals: int = 0
    rescues: int = 0
    attempt: int = 0
    #: When the worker received the claim.
    received_at: float = 0.0
    priority = 0
    worker = progress = written_progress = log = None
    meta = "{}"

    @property
    def task_path(self) -> str:
        return ASYNC if self.is_async else SYNC


@dataclass
class Shape:
    """What a worker has to do."""

    threads: int
    calls: Sequence[Call]
    #: Tasks that are enqueued later, each some seconds after the previous one, by a process that notifies the worker
    #: only if it has asked for it.
    late: Sequence[tuple[float, Call]] = ()
    #: Whether the functions settle their tasks in their own transactions.
    is_atomic: bool = False
    #: The bound of outcomes that wait for the database.
    most_unsettled: int = in_flight.MOST_UNSETTLED
    #: By how much the database is slower for outcomes than for claims.
    slowness: int = 1
    queues: Sequence[str] = ("default",)
    #: Whether notifications are certain to arrive.
    is_listening: bool = True
    #: Seconds that the database takes for half of a statement: mostly little, and much while others keep it busy.
    answers: Sequence[float] = (0.0005, 0.002, 0.002, 0.01, 0.08)


class Table:
    """The rows, and the statements of ``store/`` about them. Each statement has its snapshot somewhere in its time."""

    def __init__(self, schedule: Schedule, random: Random, shape: Shape) -> None:
        self.schedule, self.random, self.shape = schedule, random, shape
        self.ready: list[Call] = []
        self.blocked: list[Call] = []
        self.running: dict[int, Call] = {}
        self.scheduled: list[tuple[float, Call]] = []
        #: Whether the worker has asked for notifications, and what notifies it.
        self.is_told = False
        self.notify: Callable[[str], None] = lambda queue: None
        # Tasks that other processes have made ready; and those that a statement of the settler has made ready, as long
        # as its answer is on the way.
        self.silent: set[int] = set()
        self.unanswered: set[int] = set()
        self._no_worker_sleeps_until = 0.0
        self.left = len(shape.calls) + len(shape.late)
        for call in shape.calls:
            self.insert(call)

    def wait(self, times: int = 1) -> None:
        self.schedule.sleep(self.random.choice(self.shape.answers) * times)

    def insert(self, call: Call) -> None:
        if call.lock_key is None:
            self.ready.append(call)
        else:
            self.blocked.append(call)
            self._admit({call.lock_key})

    def enqueue(self, call: Call) -> None:
        """Insert as another process does, which reads whether a worker sleeps only from time to time."""
        self.silent.add(call.id)
        self.insert(call)
        if self.schedule.now < self._no_worker_sleeps_until:
            return
        self.wake([call.queue])
        if not self.is_told:
            self._no_worker_sleeps_until = self.schedule.now + NEGATIVE_TTL

    # The statements

    def claim_statement(self, *, paths: Collection[str], behind: bool = False, **_options: Any) -> Any:
        def execute(limit: int, queue: str, *position: int) -> list[Call]:
            self.wait()
            rows = [call for call in self.ready if call.queue == queue and call.task_path in paths]
            if behind:
                rows = [call for call in rows if call.id > position[1]]
            rows = sorted(rows, key=lambda call: call.id)[:limit]
            self.ready = [call for call in self.ready if call not in rows]
            claims = [replace(call, attempt=call.attempt + 1) for call in rows]
            self.running.update((call.id, call) for call in claims)
            self.silent.difference_update(call.id for call in rows)
            self.wait()
            for claim in claims:
                claim.received_at = self.schedule.now
            return claims

        return SimpleNamespace(execute=execute)

    def ready_queues(self) -> dict[str, bool]:
        self.wait()
        queues = {call.queue: False for call in self.ready}
        self.wait()
        return queues

    def settle(self, outcomes: Sequence[tuple[Call, Outcome]]) -> dict[int, float | None]:
        self.wait(self.shape.slowness)
        accepted = {claim.id: self.end(claim, outcome) for claim, outcome in outcomes}
        self.answer(accepted, self.shape.slowness)
        return accepted

    def settle_unobserved(self, claims: Sequence[Call], results: Sequence[str]) -> None:
        self.settle([(claim, SUCCEEDED) for claim in claims])

    def end(self, claim: Call, outcome: Outcome) -> float | None:
        """Write the outcome of one claim. Nobody else has claimed the task meanwhile."""
        assert self.running.pop(claim.id).attempt == claim.attempt
        if isinstance(outcome, Succeeded):
            self.left -= 1
            return self.schedule.now
        if isinstance(outcome, Abandoned):
            self.scheduled.append((self.schedule.now + outcome.delay, claim))
        else:
            assert isinstance(outcome, GivenBack)
            (self.ready if claim.lock_key is None else self.blocked).append(claim)
        return None

    def admit(self, keys: Iterable[str | None]) -> list[str]:
        self.wait()
        admitted = self._admit({key for key in keys if key is not None})
        self.answer([call.id for call in admitted])
        return [call.queue for call in admitted]

    def answer(self, ready: Iterable[int], times: int = 1) -> None:
        self.unanswered = set(ready)
        self.wait(times)
        self.unanswered = set()

    def _admit(self, keys: Collection[str]) -> list[Call]:
        busy = {call.lock_key for call in [*self.ready, *self.running.values(), *(call for _, call in self.scheduled)]}
        admitted = []
        for key in keys - busy:
            waiting = sorted((call for call in self.blocked if call.lock_key == key), key=lambda call: call.id)
            admitted += waiting[:1]
        self.blocked = [call for call in self.blocked if call not in admitted]
        self.ready += admitted
        return admitted

    def wake(self, queues: Iterable[str]) -> None:
        for queue in queues if self.is_told else ():
            self.notify(queue)

    def write_sleep_flag(self, *, is_sleeping: bool) -> None:
        self.wait()
        self.is_told = is_sleeping
        self.wait()

    def promote(self) -> None:
        """Make tasks ready whose time has come, as the upkeep of another worker does."""
        for due in [due for due in self.scheduled if due[0] <= self.schedule.now]:
            self.scheduled.remove(due)
            self.enqueue(due[1])
