"""How a task continues after an attempt: the delays of retries, and ``Retry``, ``Snooze`` and ``Cancel``. Pure.

These three are exceptions so that they can be raised from anywhere inside the function. As with every exception,
the effects of an ``atomic`` function are rolled back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Protocol

from django_pglock.errors import Picklable, TaskOptionError

#: The longest delay in seconds: ten years. PostgreSQL's dates are limited, too.
MAX_DELAY = 10 * 365 * 86400.0
#: The largest factor of ``Exponential``.
MOST_FACTOR = 1000


class Backoff(Protocol):
    """A policy that decides the wait before the next attempt."""

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after the given number of failed attempts (1 or more)."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Wait ``step`` seconds after the first failure, twice as long after the second, at most ``cap`` seconds."""

    step: float
    cap: float = 3600.0

    def __post_init__(self) -> None:
        keep(self, step=duration, cap=duration)

    def delay(self, failures: int) -> float:
        return min(self.cap, self.step * failures)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Wait up to ``base * factor ** (failures - 1)`` seconds, at most ``cap`` seconds.

    With ``jitter`` (the default) the wait is drawn evenly between zero and that bound, which spreads a crowd of
    retries best ("full jitter", Marc Brooker, *Exponential Backoff And Jitter*, AWS Architecture Blog, 2015).
    """

    base: float = 1.0
    factor: float = 2.0
    cap: float = 600.0
    jitter: bool = True

    def __post_init__(self) -> None:
        keep(self, base=duration, cap=duration)
        factor: Any = self.factor
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= MOST_FACTOR:
            raise TaskOptionError(f"Exponential: factor is {factor!r}; give a number above 0, up to {MOST_FACTOR:,}.")

    def delay(self, failures: int) -> float:
        try:
            # Of floats: a large power of an int takes long to compute, and does not overflow.
            bound = min(self.cap, self.base * float(self.factor) ** (failures - 1))
        except OverflowError:
            bound = self.cap if self.base else 0.0
        return random.uniform(0, bound) if self.jitter else bound  # noqa: S311


#: Gets the name of an option and its value, and returns what is kept. Raises ``TaskOptionError``.
Check = Callable[[str, Any], Any]


def keep(value: Any, **checks: Check) -> None:
    """Check fields of a frozen value, and keep what the checks return. None is valid where it is the default."""
    defaults = {each.name: each.default for each in fields(value)}
    for name, check in checks.items():
        if (given := getattr(value, name)) is not None or defaults[name] is not None:
            object.__setattr__(value, name, check(f"{type(value).__name__}: {name}", given))


#: What ``backoff=`` accepts: seconds, a timedelta, one of the classes above, or ``fn(exception, task_result)`` that
#: returns seconds or a timedelta (the signature of Django's open proposal new-features #142).
BackoffOption = float | int | timedelta | Backoff | Callable[[BaseException, Any], "float | timedelta"]


def duration(option: str, value: Any, most: float = MAX_DELAY) -> float:
    """Accept seconds or a timedelta, of at most ten years by default, and return seconds."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not math.isfinite(seconds) or seconds < 0:
        raise TaskOptionError(f"{option} is {value!r}; give seconds (zero or more) or a timedelta.")
    if seconds > most:
        raise TaskOptionError(f"{option} is {value!r}; the maximum is ten years.")
    return float(seconds)


#: Defined below ``duration``, which it calls.
DEFAULT_BACKOFF = Exponential()


def delay_after(backoff: BackoffOption, *, failures: int, exception: BaseException, result: Callable[[], Any]) -> float:
    """Return the seconds to wait after a failure.

    ``result`` is called for the ``TaskResult`` only if ``backoff`` is a function, because a result is expensive. Raises
    the errors of the function, and ``TaskOptionError`` if it does not return a duration. The caller must handle them,
    so that the task is not lost.
    """
    delay: Any = backoff
    if hasattr(backoff, "delay"):
        delay = backoff.delay(failures)
    elif callable(backoff):
        delay = backoff(exception, result())
    return min(duration("backoff", delay, most=math.inf), MAX_DELAY)


class FlowWord(Picklable, Exception):
    """The base of the exceptions by which a task function decides how the task continues."""


class Retry(FlowWord):
    """Try this task again ``after`` seconds or a timedelta; None (default) lets its back-off decide.

    It uses an attempt, whatever ``retry_on`` says. If none is left, the task fails. ``reason`` is shown with the
    attempt.
    """

    #: For subclasses with an ``__init__`` of their own, which may set it and need not call this one.
    seconds: float | None = None

    def __init__(self, reason: str = "", *, after: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.seconds = None if after is None else duration("after", after)


class Snooze(FlowWord):
    """Run this task again ``after`` seconds or a timedelta, as if it had not begun. No attempt is used.

    A wait of less than 0.1 s is 0.1 s long, and twice as long each time, up to two minutes.
    """

    #: For subclasses with an ``__init__`` of their own, which may set it and need not call this one.
    seconds: float = 60.0

    def __init__(self, after: float | timedelta) -> None:
        super().__init__(f"for {after}")
        self.seconds = duration("after", after)


class Cancel(FlowWord):
    """End this task as cancelled. ``reason`` is shown with the attempt."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
