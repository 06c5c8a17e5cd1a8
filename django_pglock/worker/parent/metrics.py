"""The metrics of a worker, in Prometheus' text format 0.0.4."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from django_pglock.store.count import COUNTED, QueueCounts
from django_pglock.store.numbers import BOUNDS, Counts
from django_pglock.store.numbers import OUTCOMES as ENDS
from django_pglock.store.outcome import (
    Abandoned,
    Cancelled,
    Failed,
    GivenBack,
    Interrupted,
    Retried,
    Snoozed,
    Succeeded,
)

if TYPE_CHECKING:
    from django_pglock.worker.parent.health import Health

PREFIX = "django_pglock_"
#: The characters that Prometheus requires to be escaped in the value of a label.
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = (Succeeded, Failed, Retried, Snoozed, Cancelled, Interrupted, GivenBack, Abandoned)

#: The buckets that are shown. Their bounds grow by a factor of 4, up to 70 minutes. They are few,
#: because each bucket is a time series for each function, queue and process.
SHOWN = {**{bucket: str(BOUNDS[bucket]) for bucket in range(0, 45, 4)}, len(BOUNDS): "+Inf"}

_shown_of: Any = itemgetter(*SHOWN)
_ends_of: Any = attrgetter(*ENDS)
#: The size of the cache of texts. There are three texts for each function and queue, and some for each queue.
MOST_KEPT = 10_000

#: The labels of a sample as names and values.
Labels = tuple[tuple[str, str], ...]
#: The name of a label and its values. There is one sample for each value.
Split = tuple[str, tuple[str, ...]]
#: The labels of each sample with its number or numbers. Those of a histogram are its buckets and its sum.
Samples = Iterable[tuple[Labels, Any]]
Histograms = Iterable[tuple[Labels, Sequence[int], float]]
#: The labels of a function in a queue, and its counts.
Labelled = Sequence[tuple[Labels, Counts]]
#: The name, the help text and the samples of metrics and, if there is one, the label by which the samples are split.
Family = tuple[str, str, Samples] | tuple[str, str, Samples, Split]

#: The parts of a worker that have a database session.
PARTS = ("heartbeat", "upkeep", "fetcher", "settler")


class Metrics:
    """What the children of a parent have counted, and what the upkeep has read. ``health`` is that of the parent."""

    def __init__(self, health: Health) -> None:
        self.health = health

    def exposition(self) -> str:
        """Return all metrics as text. Waits for nothing."""
        queues, totals = self.health.readings()
        ended: Labelled = [((("queue", each.queue), ("function", each.task_path)), each.counts) for each in totals]
        simple = (_lines(*each) for each in (*self._counters(ended), *self._gauges(), *depth_families(queues)))
        histograms = (_histogram_lines(*each) for each in self._histograms(ended))
        return "".join(line for lines in (*simple, *histograms) for line in lines)

    def _counters(self, ended: Labelled) -> Iterator[Family]:
        counted = self.health.counted
        yield "claims_total", "Tasks claimed.", [((), counted["claimed"])]
        outcomes = [((), tuple(counted[kind.__name__] for kind in OUTCOMES))]
        names = tuple(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower() for kind in OUTCOMES)
        yield "outcomes_total", "Claims that ended, by outcome.", outcomes, ("outcome", names)
        yield (
            "claims_lost_total",
            "Claims whose outcome was dropped, because another worker had claimed the task.",
            [((), counted["lost"])],
        )
        attempts = [(labels, _ends_of(counts)) for labels, counts in ended]
        yield (
            "attempts_total",
            "Attempts of all workers that ended, by queue, function and outcome.",
            attempts,
            ("outcome", ENDS),
        )
        reconnects = [((("part", part),), counted[part]) for part in PARTS]
        yield "reconnects_total", "Database sessions opened after one was lost, by part of the worker.", reconnects

    def _gauges(self) -> Iterator[Family]:
        now = self.health.now
        yield "worker_ready", "1 while the worker claims tasks, else 0.", [((), int(self.health.unready() is None))]
        yield "processes", "Number of processes that run tasks.", [((), now["processes"])]
        yield "threads", "Number of threads that run tasks.", [((), now["threads"])]
        yield "tasks_in_flight", "Tasks claimed and not settled yet.", [((), now["in_flight"])]
        yield "tasks_running", "Tasks that run now.", [((), now["running"])]
        yield "outcomes_waiting", "Outcomes that wait for the database.", [((), now["unsettled"])]
        if (age := self.health.beat_age()) is not None:
            yield "heartbeat_age_seconds", "Time since the last heartbeat that was written.", [((), round(age, 3))]

    def _histograms(self, ended: Labelled) -> Iterator[tuple[str, str, Histograms]]:
        waits = [(labels, counts.wait, counts.wait_seconds) for labels, counts in ended]
        yield "task_wait_seconds", "Time from ready to claimed, by queue and function.", waits
        runs = [(labels, counts.run, counts.run_seconds) for labels, counts in ended]
        yield "task_run_seconds", "Time for which the function ran, by queue and function.", runs


def depth_families(queues: Iterable[QueueCounts]) -> Iterator[Family]:
    """Yield the metrics of the queues, which are the same from each worker and from the view for web processes."""
    found = [((("queue", each.queue),), each) for each in queues]
    ready = [(labels, each.counts["READY"]) for labels, each in found]
    yield "tasks_ready", "Tasks in the database that can be claimed. Counting stops at 10000.", ready
    ages = [(labels, round(each.oldest_ready or 0.0, 3)) for labels, each in found]
    yield "oldest_ready_task_age_seconds", "Time for which a task has been waiting to be claimed.", ages
    tasks = [(labels, tuple(each.counts[status] for status in COUNTED)) for labels, each in found]
    names = tuple(map(str.lower, COUNTED))
    yield "tasks", "Tasks in the database by queue and status. Counting stops at 10000.", tasks, ("status", names)
    paused = [(labels, int(each.paused_at is not None)) for labels, each in found]
    yield "queue_paused", "1 while the queue is paused, else 0.", paused


def _lines(name: str, help_text: str, samples: Samples, split: Split | None = None) -> Iterator[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    yield _head(name, help_text, kind)
    for labels, numbers in samples:
        yield _samples(name, labels, split) % numbers


def _histogram_lines(name: str, help_text: str, histograms: Histograms) -> Iterator[str]:
    yield _head(name, help_text, "histogram")
    for labels, buckets, total in histograms:
        ends = list(accumulate(buckets))
        yield _histogram(name, labels) % (*_shown_of(ends), total, ends[-1])


# With hundreds of functions there are ten thousand lines. Only their numbers change between two scrapes.
@lru_cache(maxsize=MOST_KEPT)
def _samples(name: str, labels: Labels, split: Split | None) -> str:
    """Return the lines of samples, with ``%s`` in the place of each number."""
    more = [((split[0], value),) for value in split[1]] if split else [()]
    texts = (_braced(_escaped((*labels, *each))).replace("%", "%%") for each in more)
    return "".join(f"{PREFIX}{name}{text} %s\n" for text in texts)


@lru_cache(maxsize=MOST_KEPT)
def _histogram(name: str, labels: Labels) -> str:
    """Return the lines of a histogram, with ``%s`` in the place of the numbers: buckets, sum and count."""
    text = _escaped(labels).replace("%", "%%")
    lines = [f'{PREFIX}{name}_bucket{{{text},le="{bound}"}} %s\n' for bound in SHOWN.values()]
    return "".join([*lines, f"{PREFIX}{name}_sum{_braced(text)} %s\n{PREFIX}{name}_count{_braced(text)} %s\n"])


def _head(name: str, help_text: str, kind: str) -> str:
    return f"# HELP {PREFIX}{name} {help_text}\n# TYPE {PREFIX}{name} {kind}\n"


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def _escaped(labels: Labels) -> str:
    return ",".join(f'{name}="{value.translate(ESCAPES)}"' for name, value in labels)
