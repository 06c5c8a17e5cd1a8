"""The metrics of a worker, in Prometheus' text format 0.0.4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from django_pglock.store.outcome import Abandoned, Cancelled, Failed, Interrupted, Released, Retried, Snoozed, Succeeded
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.probes.health import Health
from django_pglock.worker.service import ConnectedService

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = (Succeeded, Failed, Retried, Snoozed, Cancelled, Interrupted, Released, Abandoned)

#: The labels of a sample as name and value, or none, and its number.
Samples = Iterable[tuple[tuple[str, str] | None, float]]


class ReadyCounts(Protocol):
    """The number of ready tasks of each queue, and the age of the oldest in seconds."""

    def ask(self) -> Mapping[str, tuple[int, float]]:
        """Return the last count."""


class Metrics:
    """What the parts of a worker have counted. ``outcomes``: ended claims, by the class of the outcome; None: lost."""

    def __init__(
        self,
        in_flight: InFlight,
        *,
        outcomes: Counter[type[Any] | None],
        ready_counts: ReadyCounts,
        health: Health,
    ) -> None:
        self.in_flight = in_flight
        self.outcomes = outcomes
        self.ready_counts = ready_counts
        self.health = health

    def exposition(self) -> str:
        """Return all metrics as text. Waits for nothing."""
        return "".join(
            line
            for name, help_text, samples in (*self._counters(), *self._gauges())
            for line in _lines(f"django_pglock_{name}", help_text, samples)
        )

    def _counters(self) -> Iterator[tuple[str, str, Samples]]:
        yield "claims_total", "Tasks claimed.", [(None, self.in_flight.claimed)]
        outcomes = [(("outcome", kind.__name__.lower()), self.outcomes[kind]) for kind in OUTCOMES]
        yield "outcomes_total", "Claims that ended, by outcome.", outcomes
        yield (
            "claims_lost_total",
            "Claims whose outcome was dropped, because another worker had claimed the task.",
            [(None, self.outcomes[None])],
        )
        connected = [service for service in self.health.services if isinstance(service, ConnectedService)]
        reconnects = [(("part", service.name), service.reconnects) for service in connected]
        yield "reconnects_total", "Database sessions opened after one was lost, by part of the worker.", reconnects

    def _gauges(self) -> Iterator[tuple[str, str, Samples]]:
        in_flight = self.in_flight
        yield "worker_ready", "1 while the worker claims tasks, else 0.", [(None, int(self.health.unready() is None))]
        yield "threads", "Number of threads that run tasks.", [(None, len(in_flight.threads.slots))]
        yield "tasks_in_hand", "Tasks claimed and not settled yet.", [(None, len(in_flight.claims))]
        yield "tasks_running", "Tasks that run now.", [(None, in_flight.running)]
        yield "outcomes_waiting", "Outcomes that wait for the database.", [(None, in_flight.unsettled)]
        if (age := self.health.beat_age()) is not None:
            yield "heartbeat_age_seconds", "Time since the last heartbeat that was written.", [(None, round(age, 3))]
        ready = self.ready_counts.ask()
        counts = [(("queue", queue), count) for queue, (count, _) in ready.items()]
        yield "tasks_ready", "Tasks in the database that can be claimed, up to 10000 or more.", counts
        ages = [(("queue", queue), round(age, 3)) for queue, (_, age) in ready.items()]
        yield "oldest_ready_task_age_seconds", "Time for which a task has been waiting to be claimed.", ages


def _lines(name: str, help_text: str, samples: Samples) -> Iterator[str]:
    yield f"# HELP {name} {help_text}\n# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n"
    for label, value in samples:
        yield f"{name}{_labels(label)} {value}\n"


def _labels(label: tuple[str, str] | None) -> str:
    if label is None:
        return ""
    name, value = label
    for character, escaped in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n")):
        value = value.replace(character, escaped)
    return f'{{{name}="{value}"}}'
