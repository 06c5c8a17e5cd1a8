"""What a worker has counted, in Prometheus' text format 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from django_pglock.store.outcome import Abandoned, Cancelled, Failed, Interrupted, Released, Retried, Snoozed, Succeeded
from django_pglock.worker.service import ConnectedService

if TYPE_CHECKING:
    from django_pglock.worker.worker import Worker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = (Succeeded, Failed, Retried, Snoozed, Cancelled, Interrupted, Released, Abandoned)

#: The labels of a sample as name and value, or none, and what it shows.
Samples = Iterable[tuple[tuple[str, str] | None, float]]


def exposition(worker: Worker) -> str:
    """Return all metrics of a worker. Asks nobody and waits for nothing."""
    return "".join(
        line
        for name, help_text, samples in (*_counters(worker), *_gauges(worker))
        for line in _lines(f"django_pglock_{name}", help_text, samples)
    )


def _counters(worker: Worker) -> Iterator[tuple[str, str, Samples]]:
    counts = worker.settler.counts
    yield "claims_total", "Tasks claimed.", [(None, worker.hand.claimed)]
    outcomes = [(("outcome", kind.__name__.lower()), counts[kind]) for kind in OUTCOMES]
    yield "outcomes_total", "Claims that ended, by what came of them.", outcomes
    yield (
        "claims_lost_total",
        "Claims whose outcome was dropped, as somebody else had the task.",
        [(None, counts[None])],
    )
    connected = [service for service in worker.services if isinstance(service, ConnectedService)]
    reconnects = [(("part", service.name), service.reconnects) for service in connected]
    yield "reconnects_total", "Database sessions opened after one was lost, by part of the worker.", reconnects


def _gauges(worker: Worker) -> Iterator[tuple[str, str, Samples]]:
    hand, health = worker.hand, worker.health
    yield "worker_ready", "1 while the worker claims tasks, else 0.", [(None, int(health.unready() is None))]
    yield "threads", "Tasks that can run at once in threads.", [(None, len(hand.threads.slots))]
    yield "tasks_in_hand", "Tasks claimed and not settled yet.", [(None, len(hand.claims))]
    yield "tasks_running", "Tasks that run now.", [(None, hand.running)]
    yield "outcomes_waiting", "Outcomes that wait for the database.", [(None, hand.unsettled)]
    if (age := health.beat_age()) is not None:
        yield "heartbeat_age_seconds", "Time since the last heartbeat that was written.", [(None, round(age, 3))]
    ready = worker.upkeep.ready_counts.ask()
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
