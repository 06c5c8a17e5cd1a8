"""What the handles of all locks and leases share: their state, log records, signals and errors."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import ref

from django_pglock import signals
from django_pglock.conf import get_settings
from django_pglock.errors import LockError, LockLost, LockNotAvailable, LockScopeError
from django_pglock.locks.request import Request
from django_pglock.locks.session_locks import (
    LockRecord,
)
from django_pglock.loggers import get_logger

if TYPE_CHECKING:
    pass

logger = get_logger("django_pglock.locks")
E = TypeVar("E", bound=LockError)
#: A hold is slow after this multiple of a slow wait: a lock is there to work under it.
SLOW_HOLD = 10
#: The reason if another statement has freed a session lock.
NOT_HELD_BY_SESSION = "PostgreSQL reports that this session did not hold it"


class BaseHandle:
    """One use of a lock: acquire, hold, release. True while the lock is held.

    ``waited`` is the number of seconds that the acquire took. ``token`` is None: only a lease has a fencing token.

    The handle owns the lock: if the handle is dropped without ``release()``, the lock is freed, and this is logged. A
    weak reference notices this, and ``release()`` removes its callback. A ``__del__`` would run for each handle, and an
    exception that a signal handler raises there, such as a time limit or Ctrl-C, would vanish.
    """

    token: int | None = None
    #: Set by ``django_pglock.testing.locks_disabled``: each acquire succeeds without a statement to PostgreSQL.
    is_disabled: ClassVar[bool] = False
    #: The noun for messages.
    _noun = "Lock"
    #: The model whose rows have the holder.
    _model = "AdvisoryLock"
    #: Seconds after which a wait is slow; 0: as the setting says.
    _slow_wait = 0.0
    scope = ""
    waited = 0.0
    #: Acquired, and not yet released by its user.
    is_open = False
    _since = 0.0
    #: Why the lock was lost, if it was.
    _reason = ""
    #: The session's record of a session lock; None until it is requested.
    _record: LockRecord | None = None
    _watch: ref[BaseHandle] | None = None

    def __init__(self, request: Request) -> None:
        self.request = request
        self.using = request.using or get_settings().USING

    def __bool__(self) -> bool:
        return self.is_held

    def _free_if_dropped(self, free: Callable[[], bool | None]) -> None:
        """Call ``free`` if this handle is dropped before ``_stop_watch``. If it returns True, this is logged.

        ``free`` must not refer to the handle.
        """
        process, noun, request = os.getpid(), self._noun, self.request

        def free_dropped(watch: ref[BaseHandle]) -> None:
            _watches.pop(id(watch), None)
            # In a process that was forked from the holder's, the lock is the parent's.
            if process == os.getpid() and not sys.is_finalizing() and free():
                logger.warning(
                    "%s %r was released because its handle was deleted without release(). Keep the handle as long as "
                    "the lock is needed.",
                    noun,
                    request.name,
                )

        watch = ref(self, free_dropped)
        self._stop_watch()
        self._watch = watch
        _watches[id(watch)] = watch

    def _stop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            _watches.pop(id(watch), None)

    @property
    def is_held(self) -> bool:
        """Whether the lock is held now."""
        return self.is_open

    @property
    def is_done(self) -> bool:
        """Whether the lock was acquired and has been released."""
        return self._since > 0 and not self.is_open

    def free_from_any_thread(self) -> None:
        """Free the lock without a wait, in any thread or coroutine, if its owner cannot release it."""
        raise NotImplementedError

    def release_from_any_thread(self) -> None:
        """Do the same, and report the end of the lock as ``release`` does. If the lock was lost, this is logged."""
        reason = "" if self.scope == "disabled" else self._lost_reason()
        self.free_from_any_thread()
        if reason:
            logger.error("%s", self._announce_lost(reason))
        self._announce_released()

    def __repr__(self) -> str:
        state = "held" if self.is_held else "not held"
        return f"<{self._noun} {self.name!r} {self.scope or 'of no scope yet'} {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Raise ``TypeError``. A copy would free the lock when Python deletes the copy."""
        raise TypeError(
            f"{self._noun} {self.name!r} cannot be copied or pickled, because its handle owns it. Pass its name."
        )

    @property
    def key(self) -> int:
        """The number that PostgreSQL locks; the first one of several."""
        return self.request.keys[0].number

    @property
    def keys(self) -> tuple[int, ...]:
        """All numbers, in the order in which they are locked."""
        return self.request.numbers

    @property
    def name(self) -> str:
        """The name for people. Several names are joined by commas."""
        return self.request.name

    @property
    def held_for(self) -> float:
        """Seconds since the acquire."""
        return time.monotonic() - self._since

    def _note_granted(self, row: Sequence[Any]) -> None:
        """Store the columns of the server's answer: the slot of a semaphore, or the idle limits before ``max_hold``."""
        record = self._record
        if self.request.queue is not None:
            self.request = self.request.only(row[0])
            if record is not None:
                record.request = self.request
        elif record is not None and self.request.max_hold is not None:
            record.locks.remember_limits(record, row[1:3])

    def _refuse_held_slots(self, held: frozenset[int]) -> None:
        """Raise ``LockError`` if all slots of a semaphore are held already, by the same thread or coroutine."""
        if not self.request.without(held).keys:
            raise LockError(f"This session already holds all slots of {self.name!r}.", name=self.name, key=self.key)

    def _acquire_disabled(self) -> None:
        self.scope = "disabled"
        self._announce_acquired()

    # Log records, signals, errors

    def _announce_acquired(self) -> None:
        self.is_open = True
        self._since = time.monotonic()
        self._log("Acquired", "waited", self.waited, self._slow_wait or get_settings().SLOW_LOCK)
        signals.lock_acquired.send_robust(type(self), handle=self)

    def _announce_released(self) -> None:
        held = time.monotonic() - self._since
        self._log("Released", "held", held, SLOW_HOLD * get_settings().SLOW_LOCK)
        signals.lock_released.send_robust(type(self), handle=self, held=held)

    def _log(self, verb: str, what: str, seconds: float, limit: float) -> None:
        is_slow = seconds >= limit
        level = logging.WARNING if is_slow else logging.DEBUG
        if logger.isEnabledFor(level):
            text = "%s %s %r after %.3f s" + (", which is longer than %g s." if is_slow else ".")
            values = (verb, self._noun.lower(), self.name, seconds, *([limit] if is_slow else []))
            logger.log(level, text, *values, extra={"lock": self.name, "key": self.key, what: seconds})

    def _busy_error(self, cause: BaseException | None) -> LockNotAvailable:
        """Report that the lock is busy, and return the error. ``cause`` is the server's error, if there is one."""
        timeout = self.request.timeout
        waited = "" if not timeout else f" within {timeout:g} s"
        error = LockNotAvailable(
            f"{self._noun} {self.name!r} has another holder and was not granted{waited}.",
            name=self.name,
            key=self.key,
            timeout=timeout,
            keys=self.keys,
            names=[key.name for key in self.request.keys],
            using=self.using,
            model=self._model,
            sqlstate=getattr(getattr(cause, "__cause__", None), "sqlstate", None),
        )
        error.__cause__ = cause
        logger.info("%s", error, extra={"lock": self.name, "key": self.key, "waited": self.waited})
        signals.lock_busy.send_robust(type(self), handle=self, waited=self.waited)
        return error

    def _report_lost(self, reason: str, error: BaseException | None, *, cause: BaseException | None = None) -> None:
        """Report a lost lock: raise ``LockLost``, or only log it if the body has already raised ``error``."""
        lost = self._announce_lost(reason)
        if error is None:
            lost.__cause__ = cause
            raise lost
        logger.error("%s", lost)

    def _announce_lost(self, reason: str) -> LockLost:
        """Send the signal of a lost lock, and return the error that says so."""
        self._reason = reason
        signals.lock_lost.send_robust(type(self), handle=self, held=self.held_for)
        return self._lost_error(reason)

    def assert_held(self) -> None:
        """Raise ``LockLost`` if the lock was released, or its session or transaction has ended."""
        if self.scope == "disabled" and self.is_open:
            return
        if not self.is_open and not self._reason and not self.is_held:
            what = "was released" if self._since else "was never acquired"
            raise self._error(LockLost, f"is not held: it {what}")
        if reason := self._lost_reason():
            raise self._lost_error(self._reason or reason)

    def _lost_reason(self) -> str:
        """Return why the lock is no longer held, as far as this is known; an empty string if it is held."""
        return "" if self.is_held else "its session has ended"

    def _lost_error(self, reason: str) -> LockLost:
        text = f"was lost before it was released: {reason}. Another session may have held it since then"
        return self._error(LockLost, text)

    def _scope_error(self, reason: str) -> LockScopeError:
        return self._error(LockScopeError, f"was not taken: {reason}")

    def _error(self, kind: type[E], text: str) -> E:
        return kind(f"{self._noun} {self.name!r} {text}.", name=self.name, key=self.key)


#: The weak references of ``_free_if_dropped``, by ``id()``: whatever happens to the handle, its reference stays alive.
_watches: dict[int, ref[BaseHandle]] = {}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, because PostgreSQL's messages have details below it."""
    return next(iter(str(error).strip().splitlines()), "no answer")
