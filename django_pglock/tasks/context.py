"""The context of a function with ``takes_context=True``: its attempt, whether it must stop, how to report progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from django_pglock.tasks import compat
from django_pglock.tasks.arguments import from_json, to_json
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.instrumentation import HEADERS


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext(compat.TaskContext):  # type: ignore[type-arg, misc]
    """The context of one attempt: Django's, with additional methods for a running task."""

    _claims: Sequence[Claim] = field(repr=False)
    _reason_to_stop: Callable[[], Exception | None] = field(repr=False)

    def check(self) -> None:
        """Raise ``TaskCancelled`` if a cancel of this task was requested, ``TaskTimeout`` if its time is over.

        This is cheap, because it sends no query.
        """
        if (reason := self._reason_to_stop()) is not None:
            raise reason

    def progress(self, done: float, total: float | None = None) -> None:
        """Report the progress of the task: ``done`` units out of ``total`` (None: not known).

        The worker writes the last value to the task's ``progress`` about once a second, in its own session, so you may
        call this as often as you like. Raises ``TaskArgumentsError`` for values that are not numbers in JSON.
        """
        text = to_json({"done": done, "total": total}, what="The progress of a task")
        for claim in self._claims:
            claim.progress = text

    @property
    def meta(self) -> dict[str, Any]:
        """The dict that was given as ``using(meta=...)`` when the task was enqueued."""
        meta: dict[str, Any] = from_json(self._claims[0].meta)
        return {name: value for name, value in meta.items() if name not in OWN_META}

    @property
    def fencing_token(self) -> int:
        """A number that grows with each attempt of this task. With it, other systems can refuse a late attempt."""
        return self._claims[0].attempt


#: The names in a row's ``meta`` that belong to this package.
OWN_META = ("options", "rate", "after", "redact", "snoozes", HEADERS)
