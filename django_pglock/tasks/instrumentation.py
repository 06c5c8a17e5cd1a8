"""The interface for tracing and error tracking: an instrument is called when tasks are enqueued and when attempts run.

``contrib/opentelemetry.py`` and ``contrib/sentry.py`` add one each. In a process without instruments, the cost is the
check of an empty tuple. An exception of an instrument is logged, and does not affect the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from django_pglock.loggers import get_logger
from django_pglock.tasks.arguments import from_json
from django_pglock.tasks.options import HEADERS

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim
    from django_pglock.tasks.fields import TaskFields

logger = get_logger("django_pglock.tasks")


class AttemptInfo(Protocol):
    """An attempt, for instruments: the function, its arguments, and the claims of the call."""

    definition: TaskFields
    args: list[Any]
    kwargs: dict[str, Any]

    @property
    def claims(self) -> Sequence[Claim]: ...


class EnqueueObserver:
    """One ``enqueue()`` or ``enqueue_many()``, observed by one instrument."""

    #: JSON values that are stored with the tasks, for the instrument of the same name in the process that runs them.
    headers: Mapping[str, Any] = {}

    def ended(self, ids: Sequence[str], error: BaseException | None) -> None:
        """Called at the end with the ids of the tasks, or with the exception, in the thread of the caller."""


class RunObserver:
    """One attempt, observed by one instrument. Called where the function runs: in its thread, or in its coroutine."""

    def raised(self, error: BaseException) -> None:
        """Called with the exception of the function, while its frames still have their variables."""

    def ended(self, outcome: Any) -> None:
        """Called with the outcome of the attempt (``store/outcome.py``); None: the claim was lost."""


class Instrument(Protocol):
    """Observes the enqueues and the attempts of this process."""

    #: The headers of a task are stored under this name.
    name: str

    def enqueuing(self, task: TaskFields) -> EnqueueObserver:
        """Begin to observe a call that enqueues."""

    def running(self, attempt: AttemptInfo) -> RunObserver:
        """Begin to observe an attempt. Context variables that are set here are those of the function."""


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


class ObservedEnqueue:
    """A block that enqueues, with the observers of all instruments."""

    def __init__(self, task: TaskFields | None = None, instruments: Sequence[Instrument] = ()) -> None:
        observers = {each.name: _call(each.enqueuing, task) for each in instruments}
        self._observers: dict[str, EnqueueObserver] = {name: each for name, each in observers.items() if each}
        self.headers = {name: {**each.headers} for name, each in self._observers.items() if each.headers}
        self._ids: Sequence[str] = ()

    def __enter__(self) -> ObservedEnqueue:
        return self

    def enqueued(self, ids: Sequence[str]) -> None:
        """Note the tasks that the block has enqueued."""
        if self._observers:
            self._ids = ids

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        for observer in reversed(self._observers.values()):
            _call(observer.ended, self._ids, error)


class ObservedRun:
    """An attempt that runs, with the observers of all instruments."""

    def __init__(self, attempt: AttemptInfo | None = None, instruments: Sequence[Instrument] = ()) -> None:
        observers = [_call(each.running, attempt) for each in instruments]
        self._observers: list[RunObserver] = [each for each in observers if each]

    def raised(self, error: BaseException) -> None:
        """Pass the exception of the function to all observers."""
        for observer in self._observers:
            _call(observer.raised, error)

    def ended(self, outcome: Any) -> None:
        """Pass the outcome to all observers, once."""
        observers, self._observers = self._observers, []
        for observer in reversed(observers):
            _call(observer.ended, outcome)


#: An attempt and a block without observers.
UNOBSERVED = ObservedRun()
_UNOBSERVED_ENQUEUE = ObservedEnqueue()


def observe_enqueue(task: TaskFields) -> ObservedEnqueue:
    """Return the context manager for a block that enqueues ``task``."""
    return ObservedEnqueue(task, instruments) if instruments else _UNOBSERVED_ENQUEUE


def observe_run(attempt: AttemptInfo) -> ObservedRun:
    """Begin to observe an attempt, in the current thread or coroutine."""
    return ObservedRun(attempt, instruments)


def headers_of(meta: str, name: str) -> Mapping[str, Any]:
    """Return the headers that the instrument of this name has stored in a row; none if they are invalid.

    ``meta`` is the JSON text of the row's column.
    """
    found = from_json(meta) if HEADERS in meta else None
    for key in (HEADERS, name):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call an instrument, and log what it raises."""
    try:
        return function(*args)
    except Exception:
        logger.exception("%s raised. The task is not affected.", getattr(function, "__qualname__", function))
        return None
