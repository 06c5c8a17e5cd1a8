"""The invariants after two verbs have run concurrently, checked in the tables and in the results of the verbs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from django.db import connection

from django_pglock.models import Task, Waiter
from django_pglock.store.admit import admit, blocked_keys
from django_pglock.store.outcome import Succeeded
from django_pglock.store.release import orphaned_waiters, release
from django_pglock.store.steps import missed_events, wake_waiting
from qa.interleavings.laws import Laws
from qa.interleavings.sessions import READ_COMMITTED, Died, VerbRun
from qa.interleavings.verbs import Results, Verb
from qa.interleavings.worlds import NAMES, World

LOCK_NOT_AVAILABLE = "55P03"
#: What a transaction at REPEATABLE READ has to expect when others were faster: serialization_failure, unique_violation.
TO_EXPECT = ("40001", "23505")

#: What each judge reads. To compile a query of Django takes longer than to execute it.
ALL_TASKS, ALL_WAITERS = (
    str(rows.query)
    for rows in (
        Task.objects.order_by("pk").values_list(*NAMES),
        Waiter.objects.exclude(has_ended=True).values_list("task_id", "awaited"),
    )
)

#: Laws of single worlds.
LAWS: dict[str, list[Callable[[Judge], None]]] = defaultdict(list)


def law(*worlds: str) -> Callable[[Callable[[Judge], None]], Callable[[Judge], None]]:
    """Add a law that holds in these worlds."""

    def add(each: Callable[[Judge], None]) -> Callable[[Judge], None]:
        for world in worlds:
            LAWS[world].append(each)
        return each

    return add


class Judge(Laws):
    """The laws of every step, and those that only an interleaving can break."""

    def __init__(self, world: World, results: Results, verbs: list[Verb], told: set[str]) -> None:
        super().__init__()
        #: A verb has not ended: its result has not been recorded.
        self.has_died = False
        self.runs: list[VerbRun] = []
        self.world, self.results, self.verbs, self.told = world, results, verbs, told

    def judge(self, runs: list[VerbRun], swallowed: list[BaseException]) -> None:
        """Raise AssertionError for each violated invariant."""
        self.no_error_but_those_to_expect(runs, swallowed)
        self.runs = runs
        self.has_died = any(run.error is not None for run in runs)
        self.is_owed = self.has_died or any(run.gave_up for run in runs)
        # The answers to these queries also bring the notifications of all that was committed before.
        self.look()
        if not self.is_owed:
            self.who_sleeps_is_told_of_what_is_ready()
        self.all_hold()
        if self.is_owed:
            # Upkeep does what a process that died has left undone.
            release("default", (awaited for _, awaited in orphaned_waiters("default", 0) if awaited is not None))
            admit("default", blocked_keys("default", ""))
            wake_waiting("default", [event for event, is_there in missed_events("default", "") if is_there])
            self.is_owed = False
            self.look()
            self.all_hold()

    def look(self) -> None:
        self.before = self.world.before
        with connection.cursor() as cursor:
            self.now = {task.pk: task for task in map(self.world.task_of, cursor.execute(ALL_TASKS))}
            self.waiters = list(cursor.execute(ALL_WAITERS))

    def all_hold(self) -> None:
        if any(verb.prunes for verb in self.verbs):
            self.pruned = self.before.keys() - self.now.keys()
        if any(verb.retries for verb in self.verbs):
            self.retried = set(self.now)
        else:
            self.counters_only_count_up()
        self.no_task_vanishes()
        self.statuses_move_as_they_may()
        self.dates_are_those_of_the_status()
        self.of_what_is_unique_there_is_one()
        self.no_more_than_allowed_have_a_key()
        self.nobody_has_what_another_has()
        self.no_claim_is_lost_without_a_reason()
        self.what_was_accepted_stays()
        for each in LAWS[self.world.name]:
            each(self)
        if not self.is_owed:
            self.nobody_overtakes_another_of_its_key()
            self.whoever_waits_for_a_key_waits_for_somebody()
            self.whoever_waits_for_others_is_counted()

    def no_error_but_those_to_expect(self, runs: list[VerbRun], swallowed: list[BaseException]) -> None:
        assert not swallowed, f"failed after the commit: {swallowed}"
        for run in runs:
            state = getattr(run.error and run.error.__cause__, "sqlstate", None)
            if run.error is None or isinstance(run.error, Died) or state == LOCK_NOT_AVAILABLE:
                continue
            if state not in TO_EXPECT or run.level == READ_COMMITTED:
                raise AssertionError(f"{type(run.error).__name__}: {run.error}") from run.error

    def nobody_overtakes_another_of_its_key(self) -> None:
        """Of the waiting tasks, count only those that waited all the time. An uncommitted task is not overtaken."""
        waited = {pk for pk, task in self.before.items() if (task.status, task.waits_for) == ("BLOCKED", 0)}
        for key, tasks in self._by_key().items():
            waiting = [each.pk for each in tasks if each.status == "BLOCKED" and each.pk in waited - self.retried]
            for task in tasks:
                is_new = task.pk not in self.before or self.before[task.pk].status not in ("READY", "RUNNING")
                if task.status == "READY" and is_new and waiting and task.pk not in self.retried:
                    assert task.pk < waiting[0], f"{task} overtook {waiting[0]} of {key}"

    def nobody_has_what_another_has(self) -> None:
        held = [*self.world.claims, *self.world.zombies, *self.results.claims]
        taken = Counter((claim.id, claim.attempt) for claim in held)
        assert all(number == 1 for number in taken.values()), f"claimed twice: {taken}"
        settled = Counter((claim.id, claim.attempt) for claim, _ in self.results.accepted)
        assert all(number == 1 for number in settled.values()), f"settled twice: {settled}"

    def no_claim_is_lost_without_a_reason(self) -> None:
        given = [*self.world.claims, *self.world.zombies, *self.results.claims]
        gone = {claim.id for claim, _ in self.results.accepted} | self.results.taken_back
        for claim in given:
            task = self.now.get(claim.id)
            is_held = task and (task.status, task.attempts, task.worker) == ("RUNNING", claim.attempt, claim.worker)
            assert is_held or claim.id in gone or self.has_died, f"{claim} was lost, and nobody has taken it back"
        running = {(task.pk, task.attempts) for task in self.now.values() if task.status == "RUNNING"}
        unknown = running - {(claim.id, claim.attempt) for claim in given}
        assert not unknown or self.has_died, f"nobody knows of these claims: {unknown}"

    def what_was_accepted_stays(self) -> None:
        for claim, outcome in self.results.accepted:
            if isinstance(outcome, Succeeded) and claim.id in self.now:
                task = self.now[claim.id]
                assert (task.status, task.attempts) == ("SUCCESSFUL", claim.attempt), f"{task!r} had succeeded"
                before = self.before.get(claim.id)
                if before is not None and claim.attempt == before.attempts:
                    # Rescue counts, and so does giving back.
                    taken_back = (task.rescues, task.uncounted) != (before.rescues, before.uncounted)
                    assert not taken_back, f"{task!r} has succeeded by a claim that was taken back"

    def who_sleeps_is_told_of_what_is_ready(self) -> None:
        for task in self.now.values():
            was_ready = task.pk in self.before and self.before[task.pk].status == "READY"
            if task.status == "READY" and not was_ready:
                assert task.queue in self.told, f"{task!r} is ready, and nobody was woken"
