"""The invariants after each step of the verbs, checked in the table."""

from __future__ import annotations

from collections import Counter, defaultdict

from django_pglock.models import RateLimit, Task
from django_pglock.tasks.call_keys import GROUPED
from django_pglock.tasks.states import FINISHED, MOVES, WAITING


class Laws:
    """A law gets the tasks as they are ``now``, as they were ``before`` the step, and the result of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, Task] = {}
        self.now: dict[int, Task] = {}
        self.waiters: list[tuple[int, int]] = []
        #: What the step has deleted, and what it has retried by hand.
        self.pruned: set[int] = set()
        self.retried: set[int] = set()
        #: A process died between a commit and what it does then, and upkeep has not come by yet.
        self.is_owed = False

    def no_task_vanishes(self) -> None:
        assert self.before.keys() - self.now.keys() == self.pruned

    def statuses_move_as_they_may(self) -> None:
        for old, new in self._pairs():
            if old.status != new.status and new.pk not in self.retried:
                assert old.status not in FINISHED, f"{old} came back from {old.status}"
                assert new.status in _reachable(old.status), f"{old} moved from {old.status} to {new.status}"

    def counters_only_count_up(self) -> None:
        """Or they begin anew, with the record of a step."""
        for old, new in self._pairs():
            assert new.attempts >= old.attempts
            assert new.retries >= old.retries or not new.retries
            assert new.rescues >= old.rescues or new.rescues <= 1

    def dates_are_those_of_the_status(self) -> None:
        for task in self.now.values():
            is_finished, is_running = task.status in FINISHED, task.status == "RUNNING"
            assert (task.finished_at is not None) == is_finished
            assert (task.expires_at is not None) == (is_finished and task.keep_result is not None), task
            assert task.waits_for == 0 or is_finished or task.status == "BLOCKED"
            assert task.cancel_requested_at is None or is_finished or is_running
            if is_running:
                assert task.enqueued_at <= task.started_at <= task.last_attempted_at
            if task.status in WAITING:
                assert task.worker is None or (task.status == "BLOCKED" and task.waits_for), task

    def of_what_is_unique_there_is_one(self) -> None:
        taken = Counter(task.unique_key for task in self.now.values() if has_unique_key(task))
        assert all(number == 1 for number in taken.values()), taken

    def no_more_than_allowed_have_a_key(self) -> None:
        for key, tasks in self._by_key().items():
            ready, running = _with(tasks, "READY"), _with(tasks, "RUNNING")
            if key.startswith(GROUPED):
                assert len(ready) + bool(running) <= 1, f"two calls of {key}"
                assert len({task.worker for task in running}) <= 1, f"two workers have {key}"
            elif rate := tasks[0].meta.get("rate"):
                assert len(ready) <= rate[1], f"more than a burst of {key}"
            else:
                limit = tasks[0].concurrency or 1
                to_be_retried = _to_be_retried(tasks) if limit == 1 else []
                assert len(ready) + len(_calls([*running, *to_be_retried])) <= limit, f"too many have {key}"
                assert len({task.worker for task in running}) <= limit, f"too many workers have {key}"

    def whoever_waits_for_a_key_waits_for_somebody(self) -> None:
        for key, tasks in self._by_key().items():
            if not any(task.waits_for == 0 for task in _with(tasks, "BLOCKED")):
                continue
            through = len(_with(tasks, "READY")) + len(_with(tasks, "RUNNING"))
            first = tasks[0]
            if "rate" in first.meta:
                is_full = through or RateLimit.objects.filter(key=key, opens_at__isnull=False).exists()
            elif key.startswith(GROUPED):
                is_full = through
            else:
                limit = first.concurrency or 1
                is_full = through >= limit or (limit == 1 and _to_be_retried(tasks))
            assert is_full, f"nobody has {key}, and somebody waits"

    def whoever_waits_for_others_is_counted(self) -> None:
        awaited = defaultdict(list)
        for task, other in self.waiters:
            awaited[task].append(other)
        for task in self.now.values():
            if task.waits_for and task.status not in FINISHED:
                assert task.waits_for == len(awaited[task.pk]), f"{task} does not wait for what it counts"
                finished = [pk for pk in awaited[task.pk] if pk not in self.now or self.now[pk].status in FINISHED]
                assert not finished, f"{task} waits for {finished} in vain"

    def _pairs(self) -> list[tuple[Task, Task]]:
        return [(self.before[pk], new) for pk, new in self.now.items() if pk in self.before]

    def _by_key(self) -> dict[str, list[Task]]:
        by_key = defaultdict(list)
        for task in self.now.values():
            if task.lock_key is not None and task.status not in FINISHED:
                by_key[task.lock_key].append(task)
        return by_key


def has_unique_key(task: Task) -> bool:
    """Return whether no other task may have the unique key of the task, by the unique index."""
    if task.unique_scope == "PERIOD":
        return task.unique_key is not None
    return (
        task.unique_key is not None
        and task.status not in FINISHED
        and (task.unique_scope == "UNFINISHED" or task.attempts == 0)
    )


def _with(tasks: list[Task], status: str) -> list[Task]:
    return [task for task in tasks if task.status == status]


def _calls(tasks: list[Task]) -> set[str | int]:
    """Return what runs in one call: a task, or the tasks of a group."""
    return {task.group_key or task.pk for task in tasks}


def _to_be_retried(tasks: list[Task]) -> list[Task]:
    """Return the tasks that keep their key for their next attempt, or while they wait for their children."""
    scheduled, blocked = _with(tasks, "SCHEDULED"), _with(tasks, "BLOCKED")
    return [task for task in scheduled if task.started_at] + [task for task in blocked if task.worker]


def _reachable(status: str) -> set[str]:
    """Return where a task may be after several moves that no person made."""
    found, ends = {status}, [status]
    while ends:
        new = MOVES[ends.pop()] - found if status not in FINISHED else set()
        found |= new
        ends += [each for each in new if each not in FINISHED]
    return found
