"""The interface for tracing and error tracking: instruments observe enqueues, attempts, and their steps.

``contrib/opentelemetry.py`` and ``contrib/sentry.py`` add one each. In a process without instruments, the cost is the
check of an empty tuple. An exception of an instrument is logged, and does not affect the task.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from django_pglock.loggers import get_logger
from django_pglock.tasks.arguments import from_json
from django_pglock.tasks.options import HEADERS

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

logger = get_logger("django_pglock.tasks")

Headers = Mapping[str, Any]


class Instrument(Protocol):
    """Observes the enqueues and attempts of this process: each by a generator, which is resumed once, at the end."""

    #: The headers of a task are stored under this name.
    name: str

    def enqueuing(self, task: TaskFields) -> Generator[Headers, tuple[Sequence[str], BaseException | None], None]:
        """Observe one ``enqueue()`` or ``enqueue_many()``, in the thread of the caller.

        It yields headers, if it observes at all: JSON values to store with the tasks, for the instrument of the same
        name in the process that runs them. Then it gets the ids of the tasks, and the exception if there was one.
        """

    def running(self, attempt: Any) -> Generator[None, Any, None]:
        """Observe one attempt (``worker/child/attempt.py``), where its function runs: in its thread or coroutine.

        Context variables that are set before the yield are those of the function. Then it gets the outcome
        (``store/outcome.py``), whose exception still has the variables of its frames; None: the claim was lost.
        """

    def stepping(self, name: str) -> Generator[None, Any, None]:
        """Observe one step of an attempt while it is executed, where its function runs. An instrument may lack this.

        A step that is recorded is not executed again. Then it gets the path and the message of the exception; None if
        there was none.
        """


#: The instruments of this process.
instruments: tuple[Instrument, ...] = ()


def add(instrument: Instrument) -> None:
    """Add an instrument. It replaces an instrument of the same name."""
    global instruments
    remove(instrument.name)
    instruments = (*instruments, instrument)


def remove(name: str) -> None:
    """Remove the instrument of this name. It still gets the ends of enqueues and attempts that have begun."""
    global instruments
    instruments = tuple(each for each in instruments if each.name != name)


class Observed:
    """One enqueue or one attempt, with the generators of the instruments that observe it."""

    def __init__(self, begin: str = "", subject: Any = None, instruments: Sequence[Instrument] = ()) -> None:
        self.headers: dict[str, Headers] = {}
        self._observers: list[Generator[Any, Any, None]] = []
        self._ids: Sequence[str] = ()
        for each in instruments:
            with _errors_logged(each):
                if not hasattr(each, begin):
                    continue
                observer = getattr(each, begin)(subject)
                if headers := next(observer, None):
                    self.headers[each.name] = {**headers}
                self._observers.append(observer)

    def __enter__(self) -> Observed:
        return self

    def enqueued(self, ids: Sequence[str]) -> None:
        """Keep the ids of the tasks that the block has enqueued."""
        if self._observers:
            self._ids = ids

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._observers:
            self.ended((self._ids, error))

    def ended(self, end: Any) -> None:
        """Pass the end to all observers, once."""
        observers, self._observers = self._observers, []
        for observer in reversed(observers):
            with _errors_logged(observer), suppress(StopIteration):
                observer.send(end)


#: An enqueue or an attempt without observers.
UNOBSERVED = Observed()


def observe_enqueue(task: TaskFields) -> Observed:
    """Return the context manager for a block that enqueues ``task``."""
    return Observed("enqueuing", task, instruments) if instruments else UNOBSERVED


def observe_run(attempt: Any) -> Observed:
    """Begin to observe an attempt, in the current thread or coroutine."""
    return Observed("running", attempt, instruments)


def observe_step(name: str) -> Observed:
    """Begin to observe a step, in the current thread or coroutine."""
    return Observed("stepping", name, instruments) if instruments else UNOBSERVED


def headers_of(meta: str, name: str) -> Headers:
    """Return the headers that the instrument of this name has stored in a row; none if they are invalid.

    ``meta`` is the JSON text of the row's column.
    """
    found = from_json(meta) if HEADERS in meta else None
    for key in (HEADERS, name):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


@contextmanager
def _errors_logged(instrument: object) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("%s raised. The task is not affected.", getattr(instrument, "__qualname__", instrument))
