"""Calls of one group, run by one call of the function."""

from __future__ import annotations

from django_pglock.postgres.connections import connection_for
from django_pglock.store.claim_group import claim_group
from django_pglock.store.outcome import Cancelled, Failed, Outcome, Released, Retried, Snoozed
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.options import Group
from django_pglock.worker.in_flight import Ending, Hand
from django_pglock.worker.running.attempt import Attempt, prepare


class GroupAttempt(Attempt):
    """One attempt for several claims. The function gets the list of their keyword arguments.

    What it returns is the result of each; when it raises, each fails by the retries that it has left.
    """

    def __init__(self, claim: Claim, using: str) -> None:
        super().__init__(claim, using)
        self.others: list[Attempt] = []
        self._error: BaseException | None = None

    def take_along(self, others: list[Attempt]) -> None:
        """Stand for these as well."""
        self.others = others
        self.args, self.kwargs = [[self.kwargs, *(other.kwargs for other in others)]], {}

    @property
    def claims(self) -> list[Claim]:
        return [self.claim, *(other.claim for other in self.others)]

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants any of its tasks: the call is everybody's, and one does not end it for the others."""
        return all(claim.is_cancelled for claim in self.claims)

    def failure(self, error: BaseException) -> Outcome:
        self._error = error
        for other in self.others:
            other.timeout, other.deadline = self.timeout, self.deadline
        return super().failure(error)

    def outcomes(self, outcome: Outcome) -> list[tuple[Claim, Outcome]]:
        return [(self.claim, outcome), *((other.claim, self._outcome_of(other, outcome)) for other in self.others)]

    def ending(self, outcome: Outcome | None, *, is_settled: bool = False) -> Ending:
        ending = super().ending(outcome, is_settled=is_settled)
        # When one claim was lost, nothing of the common transaction remains: the others run again.
        shared = Released() if outcome is None else outcome
        for other in self.others:
            other.began = self.began
        ending.companions = [
            other.ending(self._outcome_of(other, shared), is_settled=is_settled) for other in self.others
        ]
        return ending

    def _outcome_of(self, other: Attempt, outcome: Outcome) -> Outcome:
        if self._error is not None and isinstance(outcome, Failed | Retried | Snoozed | Cancelled):
            return other.failure(self._error)
        return outcome


def with_others(leader: Attempt, group: Group, hand: Hand) -> Attempt:
    """Claim what waits in the group of ``leader`` and return the attempt that stands for all of it."""
    # Before anybody is claimed: if what was tried before cannot be read, only the leader has to be given back.
    attempt = GroupAttempt(leader.claim, leader.using)
    hand.gathering[leader.claim] = leader.claim.lock_key
    try:
        claims = []
        if group.limit > 1:
            claims = claim_group(leader.using, leader.claim, limit=group.limit - 1, gather=group.seconds)
        connection = connection_for(leader.using)
        if claims and not connection.get_autocommit():
            # Where AUTOCOMMIT is off; else the claims would be the function's to commit, or to roll back.
            connection.commit()
        hand.hold(claims)
    finally:
        del hand.gathering[leader.claim]
    others: list[Attempt] = []
    for claim in claims:
        other = prepare(claim, leader.using)
        if isinstance(other, Ending):
            hand.ended(other)
        else:
            others.append(other)
    attempt.take_along(others)
    return attempt
