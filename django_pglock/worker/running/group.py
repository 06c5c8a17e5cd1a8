"""Group tasks: one call of the function runs several claims of one group."""

from __future__ import annotations

from django_pglock.postgres.connections import connection_for
from django_pglock.store.claim_group import claim_group
from django_pglock.store.outcome import Cancelled, Failed, GivenBack, Outcome, Retried, Snoozed
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.options import Group
from django_pglock.worker.ended_claim import EndedClaim
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.running.attempt import Attempt
from django_pglock.worker.running.run import prepare


class GroupAttempt(Attempt):
    """One attempt for several claims. The function gets the list of their keyword arguments.

    Its return value is the result of each claim. If it raises, each claim fails or is retried by its own retries.
    """

    def __init__(self, claim: Claim, using: str) -> None:
        super().__init__(claim, using)
        self.others: list[Attempt] = []
        self._error: BaseException | None = None

    def include(self, others: list[Attempt]) -> None:
        """Add the claims of these attempts."""
        self.others = others
        self.args, self.kwargs = [[self.kwargs, *(other.kwargs for other in others)]], {}

    @property
    def claims(self) -> list[Claim]:
        return [self.claim, *(other.claim for other in self.others)]

    @property
    def is_cancelled(self) -> bool:
        """Whether all of its tasks are cancelled. The cancel of one task does not end the common call."""
        return all(claim.is_cancelled for claim in self.claims)

    def failure(self, error: BaseException) -> Outcome:
        self._error = error
        for other in self.others:
            other.timeout, other.deadline = self.timeout, self.deadline
        return super().failure(error)

    def outcomes(self, outcome: Outcome) -> list[tuple[Claim, Outcome]]:
        return [(self.claim, outcome), *((other.claim, self._outcome_of(other, outcome)) for other in self.others)]

    def ended(self, outcome: Outcome | None, *, is_settled: bool = False) -> EndedClaim:
        ended = super().ended(outcome, is_settled=is_settled)
        # If a claim was lost, the common transaction was rolled back. The first claim is reported as lost, and the
        # other tasks run again.
        shared = GivenBack() if outcome is None else outcome
        for other in self.others:
            other.began, other.logs = self.began, self.logs
        ended.same_call = [other.ended(self._outcome_of(other, shared), is_settled=is_settled) for other in self.others]
        return ended

    def _outcome_of(self, other: Attempt, outcome: Outcome) -> Outcome:
        if self._error is not None and isinstance(outcome, Failed | Retried | Snoozed | Cancelled):
            return other.failure(self._error)
        return outcome


def with_others(first: Attempt, group: Group, in_flight: InFlight) -> Attempt:
    """Claim the waiting tasks of the group of ``first``. Return the attempt for all of them."""
    # Made before the claim. So if earlier attempts cannot be read, only the first claim has to be given back.
    attempt = GroupAttempt(first.claim, first.using)
    in_flight.claiming_groups[first.claim] = first.claim.lock_key
    try:
        claims = []
        if group.limit > 1:
            claims = claim_group(first.using, first.claim, limit=group.limit - 1, gather=group.seconds)
        connection = connection_for(first.using)
        if claims and not connection.get_autocommit():
            # With AUTOCOMMIT off, otherwise the function would commit the claims or roll them back.
            connection.commit()
        in_flight.add(claims)
    except BaseException:
        in_flight.note_lost_answer()
        raise
    finally:
        del in_flight.claiming_groups[first.claim]
    others: list[Attempt] = []
    for claim in claims:
        other = prepare(claim, first.using)
        if isinstance(other, EndedClaim):
            in_flight.end(other)
        else:
            others.append(other)
    attempt.include(others)
    return attempt
