"""What people do with tasks: retry, cancel, discard, move, delete and so on. One table, and what applies its rows.

The admin, ``locktasks`` and the methods of ``Task.objects`` are made from the table. A row says which tasks a verb
changes, how it changes them, who may do so, and in which words.

Each change is one guarded statement for a window of some thousand tasks, so that row locks are short. It names the
statuses from which it moves, so it does not change a task that has another status by now. No code reads a status first
and writes it afterwards. Rows that another transaction has locked are left out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, OperationalError, transaction
from django.db.models import Case, Exists, F, OuterRef, Q, Subquery, Value, When
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now
from django.utils.text import get_text_list
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext
from psycopg.errors import DeadlockDetected, LockNotAvailable, UniqueViolation

from django_pglock.postgres.connections import connection_for, transaction_block
from django_pglock.store.admit import admit_on_commit
from django_pglock.store.children import unfinished_gathers
from django_pglock.store.dependants import Related, cancelled_because_of, pass_cause_on, unfinished_parts
from django_pglock.store.liveness import is_alive, works
from django_pglock.store.marking import first_free, mark
from django_pglock.store.prune import delete_free, unneeded
from django_pglock.store.ready import DUE_STATUS
from django_pglock.store.release import release_on_commit, wait_again
from django_pglock.store.requests_to_worker import NOTIFY_REQUEST
from django_pglock.store.statements import EXPIRES_AT, LIMIT_WAITS, WINDOW, in_status, is_among, rows_of, run, windows
from django_pglock.store.steps import forget_failed, forget_from
from django_pglock.store.unique import HAS_UNIQUE_KEY
from django_pglock.store.wake import notify_after_commit, wake
from django_pglock.tasks.backends import our_backends
from django_pglock.tasks.queues import check_queue_name
from django_pglock.tasks.states import FINISHED, WAITING, TaskStatus

#: Returns the translated text about a number of rows, with places for ``%(count)s`` and ``%(statuses)s``. A function,
#: because a lazy text with a plural takes 30 kB of memory.
Message = Callable[[int], str]
#: A changed task: its id, and its queue, status and lock key after the change.
Moved = tuple[int, str, str, "str | None"]

#: How often a verb is tried again if rows are locked, and the seconds before each of these calls. A row is locked for a
#: moment when it is claimed, when its progress is written, and when a task for which it waits is released.
REPEATS, BETWEEN_REPEATS = 3, 0.01
#: The longest wait for a unique key. The server searches for deadlocks after a second, and the other transaction may
#: wait for this one.
WAIT = "10ms"
# Restores the limit that the caller's transaction had before.
RESTORE_WAITS = "SELECT set_config('lock_timeout', %s, true)"


def _not_changed(number: int) -> str:
    return ngettext(
        "%(count)s of the selected tasks was not changed, because of its status, or because its worker is storing its "
        "outcome. This action changes only tasks whose status is %(statuses)s.",
        "%(count)s of the selected tasks were not changed, because of their status, or because workers are storing "
        "their outcomes. This action changes only tasks whose status is %(statuses)s.",
        number,
    )


@dataclass(frozen=True)
class Offer:
    """Other tasks that a verb offers to change as well."""

    #: The name of the argument and of the option, its help, and whether it is chosen in the admin and the command.
    option: str
    help: Any
    is_preset: bool
    #: Returns the other tasks that belong to those with these ids.
    find: Callable[[str, Sequence[int]], Related]
    #: The text about a number of them.
    text: Message


@dataclass(frozen=True)
class Verb:
    """A change that users may apply to rows."""

    name: str
    #: The admin asks ``has_<permission>_permission``.
    permission: str
    #: The name of the action on a list page, and of the button on the page of one row. Empty: there is no button.
    label: Any
    button: Any
    #: The message about the rows that were changed.
    done: Message
    #: The statuses in which a row can be changed. The page of a row in another status has no button.
    statuses: frozenset[TaskStatus] = frozenset()
    #: The help of the subcommand, and what else the documentation of the method says.
    help: Any = ""
    about: str = ""
    #: Returns the new values of the columns.
    changes: Callable[[str], dict[str, Any]] = lambda value: {}
    is_deletion: bool = False
    #: Returns those of these tasks that can be changed now, besides their status.
    chosen: Callable[[Any, str], Any] = lambda tasks, value: tasks
    #: What else follows for the changed tasks, in the same transaction.
    follow: Callable[[str, list[Moved]], None] = lambda using, moved: None
    #: Whether the tasks take their unique keys again.
    takes_keys: bool = False
    #: Whether to begin with the newest rows.
    newest_first: bool = False
    #: Whether the verb needs the name of a queue.
    takes_queue: bool = False
    #: The message about selected rows that were not changed.
    unchanged: Message = _not_changed
    #: Shown by ``locktasks`` and by the admin before they ask for confirmation.
    question: Message = lambda number: ""
    #: What else it offers to change.
    offer: Offer | None = None

    @property
    def command(self) -> str:
        """The name of the subcommand of ``locktasks``."""
        return re.sub("_(stuck|finished)", "", self.name).replace("_", "-")

    def check(self, using: str, value: str) -> None:
        """Raise ``ValueError`` if the verb needs a queue, and this value is none."""
        if self.takes_queue:
            check_target(using, value)

    def movable(self, rows: Any, value: str = "") -> Any:
        """Return the rows that the verb would change now."""
        return self.chosen(rows.filter(status__in=sorted(self.statuses)), value)

    def ids(self, rows: Any, value: str = "") -> list[int]:
        """Return the ids of the rows that the verb would change now, in the order in which it changes them."""
        return list(
            self.movable(rows, value).order_by("-pk" if self.newest_first else "pk").values_list("pk", flat=True)
        )

    def related(self, rows: Any) -> Related:
        """Return the other tasks that the verb offers to change with these rows."""
        return Related() if self.offer is None else self.offer.find(rows.db, self.ids(rows))

    def apply(self, rows: Any, value: str = "", related: Sequence[int] = ()) -> int:
        """Change the rows of a queryset, in windows of some thousand, and then the related tasks. Return how many.

        Outside of a transaction, each window is a transaction, so after an interruption the finished windows stay.
        Rows and related tasks of one window are one transaction. Raises ``ValueError`` for a wrong value.
        """
        connection_for(rows.db)  # raises a sentence for an alias that does not exist
        self.check(rows.db, value)
        ids = self.ids(rows, value)
        is_one = related and len(ids) + len(related) <= WINDOW
        with transaction_block(rows.db) if is_one else nullcontext():
            count = sum(_change_window(rows, window, self, value) for window in windows(ids, WINDOW))
            others, rest = rows_of("Task", rows.db), sorted(related, reverse=self.newest_first)
            return count + sum(_change_window(others, window, self, value) for window in windows(rest, WINDOW))

    def message(self, text: Message, number: int, *, most: int | None = None) -> str:
        """Return the text about a number of rows; ``most`` is the number at which counting stops."""
        count = str(number) if most is None or number <= most else f"{most}+"
        labels = [str(status.label) for status in sorted(self.statuses)]
        return text(number) % {"count": count, "statuses": get_text_list(labels)}


def _change_window(tasks: Any, ids: Sequence[int], verb: Verb, value: str) -> int:
    if verb.is_deletion:
        return delete_free(verb.movable(tasks.filter(is_among(ids)), value))
    changed = _change(tasks, ids, verb, value)
    for _repeat in range(REPEATS):
        # A task that was changed may be movable again: it was retried, and is cancelled again for its ``after=``.
        left = verb.ids(tasks.filter(is_among(set(ids).difference(changed))), value)
        if not left:
            break
        time.sleep(BETWEEN_REPEATS)
        changed += _change(tasks, left, verb, value)
    return len(changed)


def _change(tasks: Any, ids: Sequence[int], verb: Verb, value: str) -> list[int]:
    """Change those of these tasks that are free, by one statement. Return their ids.

    A statement can leave out a locked row, but not a unique key that another transaction is taking. Then each half is
    changed alone, until only the task of that key is left out.
    """
    rows = verb.movable(tasks.filter(is_among(ids)), value).order_by("id")
    try:
        with _limited_waits(tasks.db) if verb.takes_keys else transaction_block(tasks.db):
            return _change_free(rows, verb, value)
    except (IntegrityError, OperationalError) as error:
        if not isinstance(error.__cause__, (UniqueViolation, LockNotAvailable, DeadlockDetected)):
            raise
    half = len(ids) // 2
    return [id_ for part in (ids[:half], ids[half:]) for id_ in _change(tasks, part, verb, value)] if half else []


def _change_free(rows: Any, verb: Verb, value: str) -> list[int]:
    columns = ("id", "queue", "status", "lock_key")
    moved: list[Any] = mark(first_free(rows, no_key=True), verb.changes(value), *columns)
    wake(rows.db, (queue for _id, queue, status, _key in moved if status == TaskStatus.READY))
    # A task that still runs, whose cancel is only requested, keeps its key.
    admit_on_commit(rows.db, {key for *_others, status, key in moved if status != TaskStatus.RUNNING})
    release_on_commit(rows.db, [id_ for id_, _queue, status, _key in moved if status in FINISHED])
    verb.follow(rows.db, moved)
    return [id_ for id_, *_others in moved]


@contextmanager
def _limited_waits(using: str) -> Iterator[None]:
    """Execute the block as one transaction, and limit the wait of each of its statements for a lock."""
    with transaction_block(using):
        [(before, _limit)] = run(using, LIMIT_WAITS, WAIT)
        yield
        run(using, RESTORE_WAITS, before)


# Reset

_CANCEL_REQUESTED = Q(cancel_requested_at__isnull=False)


def stuck(tasks: Any) -> Any:
    """Return the running tasks of dead workers: those without a row, and those without heartbeat for the hard limit.

    A worker whose session works may only be unable to write its heartbeat.
    """
    # No join, because the planner might look up the worker of each task. The tasks are read in the order of the index
    # on status and id, so that a list reads only as many tasks as it shows. The index on workers has another order.
    living = rows_of("Worker", tasks.db).filter(is_alive() | works()).order_by().values("pk")
    # As a query, which names no database: a verb uses another one if a router sends reads to a replica.
    return in_status(tasks, TaskStatus.RUNNING).exclude(worker__in=living.query)


def _seen(tasks: Any) -> Any:
    """Return those of the running tasks whose claim is the one that the statement has seen, as in ``RESCUE``.

    Before the statement locks a row, a worker may rescue and claim the task. It may be so new that the list of living
    workers does not contain it. PostgreSQL then checks the new version of the row, but a subquery reads the old one.
    """
    before = rows_of("Task", tasks.db).filter(pk=OuterRef("pk")).values("attempts")
    return tasks.filter(attempts=Subquery(before[:1]))


def _reset(value: str) -> dict[str, Any]:
    return {
        "status": Case(When(_CANCEL_REQUESTED, then=Value(TaskStatus.CANCELLED.value)), default=DUE_STATUS),
        "finished_at": Case(When(_CANCEL_REQUESTED, then=Now())),
        "expires_at": Case(When(_CANCEL_REQUESTED, then=RawSQL(EXPIRES_AT, ()))),  # noqa: S611
        "worker": None,
    }


# Retry


def _retry(value: str) -> dict[str, Any]:
    return {
        "status": DUE_STATUS,
        "waits_for": 0,
        "retries": 0,
        "rescues": 0,
        # Now, so that the age of the oldest ready task and the wait of this task do not include the time before.
        "run_after": Now(),
        "worker": None,
        "finished_at": None,
        "cancel_requested_at": None,
        "meta": RawSQL("CASE WHEN meta ? 'snoozes' THEN meta - 'snoozes' ELSE meta END", ()),
        "progress": None,
        "fingerprint": None,
        "expires_at": None,
    }


def _follow_retry(using: str, moved: list[Moved]) -> None:
    ids = [id_ for id_, *_others in moved]
    forget_failed(using, ids)
    wait_again(using, ids)
    pass_cause_on(using, ids)


def _without_duplicates(tasks: Any, value: str = "") -> Any:
    """Return the tasks whose unique key is free. Of several that may be retried with the same key, return the last."""
    others = tasks.model._base_manager.using(tasks.db).filter(unique_key=OuterRef("unique_key"))
    there = others.filter(HAS_UNIQUE_KEY).exclude(pk=OuterRef("pk"))
    # Of the failed and cancelled tasks, without the successful ones, which may be so many that PostgreSQL would not
    # hash them.
    last = tasks.filter(unique_key__isnull=False).order_by("unique_key", "-pk").distinct("unique_key")
    return tasks.filter(Q(unique_key__isnull=True) | (~Exists(there) & Q(pk__in=last.values("pk"))))


# Cancel

_RUNNING = Q(status=TaskStatus.RUNNING)


def _cancel(value: str) -> dict[str, Any]:
    return {
        "status": Case(When(_RUNNING, then=F("status")), default=Value(TaskStatus.CANCELLED.value)),
        "finished_at": Case(When(_RUNNING, then=None), default=Now()),
        "expires_at": Case(When(_RUNNING, then=None), default=RawSQL(EXPIRES_AT, ())),  # noqa: S611
        "cancel_requested_at": Case(When(_RUNNING, then=Now())),
    }


def _follow_cancel(using: str, moved: list[Moved]) -> None:
    """Ask the workers of running tasks to end them, and cancel the children of tasks that wait for them."""
    asked = [id_ for id_, _queue, status, _key in moved if status == TaskStatus.RUNNING]
    if asked:
        notify_after_commit(using, NOTIFY_REQUEST, asked)
    if children := unfinished_gathers(using, {id_ for id_, *_others in moved}.difference(asked)):
        CANCEL.apply(rows_of("Task", using).filter(is_among(children)))


# Move


def check_target(using: str, queue: str) -> None:
    """Raise ``ValueError`` for an invalid name, and for a name that no backend of this database lists in QUEUES."""
    check_queue_name(queue)
    here = [backend.queues for backend in our_backends(using)]
    # A backend with an empty QUEUES accepts every name.
    if here and not any(queue in queues or not queues for queues in here):
        raise ValueError(f"No backend in TASKS lists the queue {queue!r} in QUEUES, so no task may be in it.")


# The table

RESET = Verb(
    name="reset_stuck",
    permission="reset",
    label=_("Reset stuck tasks"),
    button=_("Reset"),
    help=_("Make stuck tasks ready again: running tasks whose worker is dead."),
    about="If the worker comes back, it has lost its claim. A task whose cancel was requested becomes CANCELLED.",
    statuses=frozenset({TaskStatus.RUNNING}),
    chosen=lambda tasks, value: _seen(stuck(tasks)),
    changes=_reset,
    done=lambda n: ngettext("%(count)s stuck task is ready again.", "%(count)s stuck tasks are ready again.", n),
    unchanged=lambda n: ngettext(
        "%(count)s of the selected tasks was not changed: its worker is alive, or the task no longer runs.",
        "%(count)s of the selected tasks were not changed: their workers are alive, or the tasks no longer run.",
        n,
    ),
    question=lambda n: ngettext("%(count)s stuck task would be reset.", "%(count)s stuck tasks would be reset.", n),
)
RETRY = Verb(
    name="retry",
    permission="retry",
    label=_("Retry failed or cancelled tasks"),
    button=_("Retry"),
    help=_("Run failed or cancelled tasks again, with their full number of retries."),
    about="A task with after= waits again for those tasks that have not succeeded. If one of them has failed and is "
    "not retried as well, the task is cancelled again. With dependants=True the tasks that were cancelled because of "
    "one of these are retried with it. They wait for it again. A task of which another dependency has failed as well "
    "stays cancelled. A unique task is not retried while another task has its key. Of several tasks with the same "
    "key, only the last is retried.",
    statuses=frozenset({TaskStatus.FAILED, TaskStatus.CANCELLED}),
    chosen=_without_duplicates,
    changes=_retry,
    takes_keys=True,
    follow=_follow_retry,
    done=lambda n: ngettext("%(count)s task will run again.", "%(count)s tasks will run again.", n),
    question=lambda n: ngettext("%(count)s task would run again.", "%(count)s tasks would run again.", n),
    unchanged=lambda n: ngettext(
        "%(count)s of the selected tasks was not changed: it is neither failed nor cancelled, or another task has its "
        "unique key.",
        "%(count)s of the selected tasks were not changed: they are neither failed nor cancelled, or other tasks have "
        "their unique keys.",
        n,
    ),
    offer=Offer(
        option="dependants",
        help=_(
            "Retry the tasks that were cancelled because of these as well. They wait for these again. Default: yes."
        ),
        is_preset=True,
        find=cancelled_because_of,
        text=lambda n: ngettext(
            "And %(count)s task that was cancelled because of it.",
            "And %(count)s tasks that were cancelled because of it.",
            n,
        ),
    ),
)
DISCARD = Verb(
    name="discard",
    permission="cancel",
    label=_("Discard failed tasks"),
    button=_("Discard"),
    help=_("Cancel failed tasks that will not be run again. They are no longer among the failures."),
    about="Their attempts stay, and so does the date of their end.",
    statuses=frozenset({TaskStatus.FAILED}),
    changes=lambda value: {"status": TaskStatus.CANCELLED.value, "fingerprint": None},
    done=lambda n: ngettext("%(count)s failed task was cancelled.", "%(count)s failed tasks were cancelled.", n),
    question=lambda n: ngettext(
        "%(count)s failed task would be cancelled. It would no longer be among the failures.",
        "%(count)s failed tasks would be cancelled. They would no longer be among the failures.",
        n,
    ),
)
RUN_NOW = Verb(
    name="run_now",
    permission="retry",
    label=_("Run scheduled tasks now"),
    button=_("Run now"),
    help=_("Run scheduled tasks now instead of at their time."),
    statuses=frozenset({TaskStatus.SCHEDULED}),
    # Now, so that the age of the oldest ready task does not include the time before.
    changes=lambda value: {"status": DUE_STATUS, "run_after": Now()},
    done=lambda n: ngettext("%(count)s task will run now.", "%(count)s tasks will run now.", n),
    question=lambda n: ngettext("%(count)s task would run now.", "%(count)s tasks would run now.", n),
)
CANCEL = Verb(
    name="cancel",
    permission="cancel",
    label=_("Cancel tasks"),
    button=_("Cancel"),
    help=_("Cancel unfinished tasks. Running tasks are asked to end."),
    about="A waiting task will never run, and neither will the children for which it waits in context.gather(). For a "
    "running task, its worker passes the request on to the function. The task stays RUNNING until the function has "
    "ended. Then it is CANCELLED if the function raised, and SUCCESSFUL if it returned nevertheless. The newest tasks "
    "are first. With parts=True the unfinished tasks for which these tasks wait, and no others, are cancelled as well.",
    statuses=frozenset({*WAITING, TaskStatus.RUNNING}),
    # Without those whose cancel was requested before.
    chosen=lambda tasks, value: tasks.filter(~_RUNNING | Q(cancel_requested_at__isnull=True)),
    changes=_cancel,
    follow=_follow_cancel,
    # Otherwise the cancel of an older task could admit a newer one to its lock key, or release it from its ``after=``,
    # before the newer one is cancelled.
    newest_first=True,
    done=lambda n: ngettext(
        "%(count)s task was cancelled, or asked to end if it runs.",
        "%(count)s tasks were cancelled, or asked to end if they run.",
        n,
    ),
    question=lambda n: ngettext(
        "%(count)s task would be cancelled, or asked to end if it runs.",
        "%(count)s tasks would be cancelled, or asked to end if they run.",
        n,
    ),
    offer=Offer(
        option="parts",
        help=_("Cancel the unfinished tasks as well for which only these wait. Default: no."),
        is_preset=False,
        find=unfinished_parts,
        text=lambda n: ngettext(
            "And %(count)s unfinished task for which no other task waits.",
            "And %(count)s unfinished tasks for which no other task waits.",
            n,
        ),
    ),
)
MOVE = Verb(
    name="move_to_queue",
    permission="move",
    label=_("Move waiting tasks to another queue"),
    button="",
    help=_("Move waiting tasks to another queue."),
    about="Running and finished tasks stay in their queue. Raises ValueError for a queue that no backend of this "
    "database lists in QUEUES.",
    statuses=WAITING,
    chosen=lambda tasks, queue: tasks.exclude(queue=queue),
    changes=lambda queue: {"queue": queue},
    takes_queue=True,
    done=lambda n: ngettext("%(count)s task was moved.", "%(count)s tasks were moved.", n),
    unchanged=lambda n: ngettext(
        "%(count)s of the selected tasks was not moved: it does not wait, or is in this queue already.",
        "%(count)s of the selected tasks were not moved: they do not wait, or are in this queue already.",
        n,
    ),
    question=lambda n: ngettext(
        "%(count)s waiting task would be moved, unless it is in that queue already.",
        "%(count)s waiting tasks would be moved, except those that are in that queue already.",
        n,
    ),
)
DELETE = Verb(
    name="delete_finished",
    # Not "delete": with that, Django would offer its own page, which loads all attempts, and asks no verb.
    permission="remove",
    label=_("Delete finished tasks"),
    button=_("Delete"),
    help=_("Delete finished tasks, whatever their age, with their attempts."),
    about="A task stays if other tasks wait for it, if its unique key is taken for a period, or if a row of the "
    "project refers to it.",
    statuses=FINISHED,
    chosen=lambda tasks, value: unneeded(tasks),
    is_deletion=True,
    done=lambda n: ngettext("%(count)s task was deleted.", "%(count)s tasks were deleted.", n),
    unchanged=lambda n: ngettext(
        "%(count)s of the selected tasks was not deleted: it is not finished, or is still needed.",
        "%(count)s of the selected tasks were not deleted: they are not finished, or are still needed.",
        n,
    ),
    question=lambda n: ngettext(
        "%(count)s finished task would be deleted, with its attempts. This cannot be undone.",
        "%(count)s finished tasks would be deleted, with their attempts. This cannot be undone.",
        n,
    ),
)
VERBS = {verb.name: verb for verb in (RESET, RETRY, DISCARD, RUN_NOW, CANCEL, MOVE, DELETE)}


def run_again_from(using: str, task_id: int, step: str) -> list[str]:
    """Delete the record of a step of a task and those of all later ones, and let the task run now.

    Returns the names of these steps. Nothing is changed, and the list is empty, while the task runs or waits for its
    children, if it has succeeded, if another task has its unique key, and if there is no such step.
    """
    tasks = rows_of("Task", using).filter(pk=task_id)
    with transaction_block(using):
        # Locked first, so that no worker claims the task between the two changes.
        rows = tasks.filter(waits_for=0).select_for_update(no_key=True).values_list("status", "lock_key")
        status, key = next(iter(rows), ("", None))
        # Meanwhile nobody else admits a task at its key.
        admit_on_commit(using, [key])
        verb = {"FAILED": RETRY, "CANCELLED": RETRY, "SCHEDULED": RUN_NOW}.get(status)
        if verb is None and status not in (TaskStatus.READY, TaskStatus.BLOCKED):
            return []
        names = forget_from(using, task_id, step)
        if names and verb is not None and not verb.apply(tasks):
            transaction.set_rollback(True, using=using)
            return []
        return names
