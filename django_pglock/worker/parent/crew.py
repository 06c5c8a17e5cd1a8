"""The children of one database, with the heartbeat and the upkeep for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.liveness import HeartbeatReply
from django_pglock.worker.loop import Loop, Timer
from django_pglock.worker.parent.children import Child, Children
from django_pglock.worker.parent.heartbeat import Heartbeat
from django_pglock.worker.parent.starter import Starter
from django_pglock.worker.parent.upkeep import Upkeep

logger = get_logger(WORKER)


class Crew:
    """The children of one database, with the heartbeat and the upkeep for them."""

    def __init__(
        self,
        loop: Loop,
        starter: Callable[[], Starter],
        options: dict[str, Any],
        *,
        first: int,
        count: int,
    ) -> None:
        self.loop = loop
        self.using: str = options["using"]
        self.id = uuid4()
        self.children = Children(
            loop,
            starter,
            count,
            first=first,
            options={**options, "parent": str(self.id)},
            on_start=lambda child: self.heartbeat.beat_soon(),
            on_message=self._on_message,
            on_end=self._on_end,
        )
        self.heartbeat = Heartbeat(
            loop,
            self.using,
            self.id,
            beats=self.children.beats,
            busy=self.children.busy,
            on_beat=self._on_beat,
            on_lost=self._on_lost,
            on_wake=self._on_wake,
            on_missed=lambda: self.children.tell(poll=True),
            on_scheduled=self._on_scheduled,
            on_request=self._on_request,
            on_missing=self._on_missing,
        )
        self.upkeep = Upkeep(
            self.using,
            promoted=lambda: loop.call_soon(self._on_promoted),
            unbroken_for=self.heartbeat.unbroken_for,
            is_quiet=lambda: self.heartbeat.is_quiet,
            on_rest=lambda seconds: loop.call_soon(lambda: self._wake_upkeep_in(seconds)),
        )
        self._ready: set[UUID] = set()
        self._has_beaten = False
        self._next_upkeep: Timer | None = None

    def start(self) -> None:
        """Start the children, and open the session."""
        self.heartbeat.start()
        self.children.start()

    def _on_beat(self, replies: dict[UUID, HeartbeatReply], began: float) -> None:
        self.upkeep.set_older_parents(self.heartbeat.older_parents or 0)
        if replies and not self._has_beaten:
            self._has_beaten = True
            self.upkeep.wake()
        for child in self.children.all:
            if reply := replies.get(child.id):
                child.channel.send(beat=[began, self.heartbeat.is_listening, reply.is_sleeping])
                self._note_ready(child)

    def _wake_upkeep_in(self, seconds: float) -> None:
        if self._next_upkeep is not None:
            self._next_upkeep.cancel()
        self._next_upkeep = self.loop.call_later(seconds, self.upkeep.wake)

    def _note_ready(self, child: Child) -> None:
        if child.is_ready and child.id not in self._ready:
            self._ready.add(child.id)
            queues = ", ".join(map(repr, self.children.options["queues_given"])) or "all queues"
            logger.info("Worker %s is ready: %s.", child.name, queues)

    def _on_lost(self, error: BaseException) -> None:
        self.children.tell(cut=True)

    def _on_wake(self, worker: str, queue: str, hops: int) -> None:
        if child := self.children.serving(worker):
            child.channel.send(wake=[queue, hops])

    def _on_promoted(self) -> None:
        # Otherwise a notification comes for those that sleep.
        if not self.heartbeat.is_listening:
            self.children.tell(poll=True)

    def _on_scheduled(self) -> None:
        self.upkeep.wake()

    def _on_missing(self) -> None:
        self.upkeep.rescue_soon()

    def _on_request(self, worker: str, task: int, attempt: int, is_cancel: bool) -> None:
        if child := self.children.find(worker):
            if is_cancel:
                child.channel.send(cancel=[[task, attempt]])
            else:
                child.channel.send(stack=[task, attempt])

    def _on_message(self, child: Child, kind: str, value: Any) -> None:
        match kind:
            case "ready":
                self.heartbeat.beat_soon()
            case "scheduled":
                self.upkeep.wake()
            case "stack":
                task, attempt, text = value
                self.heartbeat.answer_stack(child.id, task, attempt, text)

    def _on_end(self, child: Child, code: int) -> None:
        """A worker without a row is dead: its tasks are rescued at once."""
        self._ready.discard(child.id)
        self.upkeep.end_worker(child.id, child.overruns)
