"""A claim that has ended, together with its outcome, for the settler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_pglock.store.outcome import Outcome
from django_pglock.tasks.claim import Claim

if TYPE_CHECKING:
    from django_pglock.tasks.compat import TaskResult


@dataclass(slots=True, eq=False)
class EndedClaim:
    """One claim and its outcome.

    ``outcome`` is None if the task no longer belonged to the claim. ``is_settled``: an atomic task has already written
    the outcome in its own transaction, so the settler only reports it.
    """

    claim: Claim
    outcome: Outcome | None
    #: The result object for signal receivers and logs; None: there is no observer.
    result: TaskResult[..., object] | None = None
    is_settled: bool = False
    #: How many seconds the function ran, if it began.
    seconds: float | None = None
    #: When the task finished, in seconds since the epoch by the database's clock.
    finished_at: float | None = None
    #: The other claims of the same group call, with their outcomes.
    same_call: Sequence[EndedClaim] = ()
