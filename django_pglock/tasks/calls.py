"""The calls of a function with ``group=``: a list of their keyword arguments, of which single ones may fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from django.db import connections, transaction

from django_pglock.postgres.stopping import current_attempt

Arguments = dict[str, Any]


class Calls(list[Arguments]):
    """The list that a function with ``group=`` gets: the keyword arguments of each call, in the order of the calls.

    Each call is a task. If the function returns, all of them succeed, except those that have failed by ``fail()`` or in
    ``each()``. If the function raises, all of them fail. Without a worker, as in ``task.call([...])``, the error of a
    single call is raised.
    """

    def __init__(
        self, calls: Iterable[Arguments], errors: dict[int, Exception] | None = None, using: str | None = None
    ) -> None:
        super().__init__(calls)
        # By the places of the calls, whose dicts may be equal. None: there is no worker.
        self._errors = errors
        self._calls = tuple(self)
        self._places = {id(call): place for place, call in enumerate(self._calls)}
        # The database of an atomic group; None: the group has no transaction.
        self._using = using

    def fail(self, call: Arguments, error: Exception) -> None:
        """Have one call end by an error, as if the function had raised it for this call alone.

        - ``call``: the dict from this list, and not a copy of it.
        - ``error``: an exception. The options of the task decide whether the call is retried; ``Retry``, ``Snooze`` and
          ``Cancel`` are possible, too.

        What the function has written for the call stays. The last error counts. Raises ``ValueError`` for another dict,
        and ``TypeError`` for something that is no exception.
        """
        place = self._place_of(call)
        if not isinstance(error, Exception):
            raise TypeError(f"calls.fail() takes an exception and got {error!r}. Write calls.fail(call, ValueError()).")
        if self._errors is None:
            raise error
        self._errors[place] = error

    @contextmanager
    def each(self, call: Arguments) -> Iterator[None]:
        """Return a block for one call: an exception in it is the failure of this call alone, as by ``fail()``.

        With ``atomic=True`` the block is a savepoint. What it has written is rolled back with its exception, and all
        else is committed. An exception leaves the block only if the function must end, or if the transaction cannot
        continue. Raises ``ValueError`` for a dict that is not in this list.
        """
        self._place_of(call)
        try:
            with transaction.atomic(self._using) if self._using else nullcontext():
                yield
        except Exception as error:
            if not self._can_continue():
                raise
            self.fail(call, error)

    def _place_of(self, call: Arguments) -> int:
        place = self._places.get(id(call))
        if place is None:
            raise ValueError(
                f"This is none of the {len(self._calls)} calls that the function got. Pass the dict itself from the "
                "list of calls, and not a copy of it."
            )
        return place

    def _can_continue(self) -> bool:
        """Return whether the function may continue after an error, and a savepoint has rolled back what it has left."""
        attempt = current_attempt.get()
        if attempt is not None and attempt.reason_to_stop() is not None:
            return False
        if self._using is None:
            return True
        connection = connections[self._using]
        return not (connection.needs_rollback or connection.closed_in_transaction)
