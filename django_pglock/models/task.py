"""The model of a task."""

from __future__ import annotations

from django.db import models
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_pglock.models.base import OnPostgreSQL, Row, manager_for_dumpdata
from django_pglock.models.managers import TaskManager
from django_pglock.store.unique import HAS_UNIQUE_KEY
from django_pglock.tasks.states import FINISHED, READABLE, TaskStatus, UniqueScope

_OPEN = Q(finished_at__isnull=True)
#: The condition that a row must meet in each status.
_NEEDS: dict[str, Q] = {
    TaskStatus.READY.value: _OPEN,
    TaskStatus.RUNNING.value: _OPEN & Q(worker__isnull=False, last_attempted_at__isnull=False),
    TaskStatus.SCHEDULED.value: _OPEN & Q(run_after__isnull=False),
    TaskStatus.BLOCKED.value: _OPEN & (Q(lock_key__isnull=False) | Q(waits_for__gt=0)),
    **dict.fromkeys(sorted(FINISHED), Q(finished_at__isnull=False)),
}


class Task(models.Model):
    """One call of a task function, from enqueue to its end. ``attempts`` is its fencing token."""

    id = models.BigAutoField(_("id"), primary_key=True)
    status = models.CharField(_("status"), max_length=16, choices=TaskStatus.choices, db_default=TaskStatus.READY.value)
    queue = models.CharField(_("queue"), max_length=128)
    priority = models.SmallIntegerField(_("priority"), db_default=0, help_text=_("Higher runs first."))
    task_path = models.CharField(_("task function"), max_length=512)
    args = models.JSONField(_("arguments"), db_default=models.Value([], models.JSONField()))
    kwargs = models.JSONField(_("keyword arguments"), db_default=models.Value({}, models.JSONField()))
    backend = models.CharField(_("backend"), max_length=64)
    retries = models.SmallIntegerField(_("retries"), db_default=0, help_text=_("Failed attempts that were retried."))
    max_retries = models.SmallIntegerField(_("maximum retries"), db_default=0)
    attempts = models.IntegerField(_("attempts"), db_default=0, help_text=_("Claims so far: the fencing token."))
    uncounted = models.IntegerField(
        _("uncounted claims"), db_default=0, help_text=_("Claims that do not count as attempts: given back or snoozed.")
    )
    rescues = models.SmallIntegerField(
        _("rescues"), db_default=0, help_text=_("Number of times the worker or the session died that ran the task.")
    )
    worker = models.UUIDField(_("worker"), null=True, editable=False)
    lock_key = models.CharField(
        _("lock key"), max_length=512, null=True, help_text=_("Limits how many tasks with the same key run at once.")
    )
    # Negative while the task does not count, because the run of its group counts by another task: store/claim.py.
    concurrency = models.SmallIntegerField(
        _("concurrency"), null=True, help_text=_("How many tasks with the same lock key may run at once.")
    )
    group_key = models.CharField(
        _("group key"), max_length=512, null=True, help_text=_("Waiting tasks with the same key run in one call.")
    )
    fair_key = models.CharField(
        _("fair key"), max_length=512, null=True, help_text=_("Tasks with different keys take turns.")
    )
    unique_key = models.CharField(_("unique key"), max_length=512, null=True)
    unique_scope = models.CharField(_("unique"), max_length=16, choices=UniqueScope.choices, null=True)
    unique_until = models.DateTimeField(_("unique until"), null=True)
    waits_for = models.IntegerField(
        _("waits for"), db_default=0, help_text=_("Number of tasks that have to finish before this one.")
    )
    cancel_requested_at = models.DateTimeField(_("cancel requested at"), null=True)
    run_after = models.DateTimeField(_("run after"), null=True)
    enqueued_at = models.DateTimeField(_("enqueued at"), db_default=Now())
    started_at = models.DateTimeField(_("started at"), null=True)
    last_attempted_at = models.DateTimeField(_("last attempted at"), null=True)
    finished_at = models.DateTimeField(_("finished at"), null=True)
    keep_result = models.IntegerField(
        _("keep result"), null=True, help_text=_("Seconds for which the row is kept after the task has finished.")
    )
    expires_at = models.DateTimeField(_("expires at"), null=True)
    fingerprint = models.BigIntegerField(_("fingerprint"), null=True, editable=False)
    progress = models.JSONField(_("progress"), null=True)
    #: The latest request for the stack of the running task, and the answer of its worker: requests_to_worker.py.
    stack = models.JSONField(_("stack"), null=True, editable=False)
    result = models.JSONField(_("result"), null=True)
    log = models.TextField(_("log"), null=True, editable=False, help_text=_("Log records of the last attempt."))
    meta = models.JSONField(_("meta"), db_default=models.Value({}, models.JSONField()))

    for_dumpdata = manager_for_dumpdata(TaskManager)
    objects = TaskManager()

    class Meta(OnPostgreSQL):
        verbose_name = _("task")
        verbose_name_plural = _("tasks")
        ordering = ["-id"]
        permissions = [
            ("retry_task", _("Can retry tasks")),
            ("cancel_task", _("Can cancel tasks")),
            ("reset_task", _("Can reset stuck tasks")),
            ("export_task", _("Can export tasks")),
            ("stack_task", _("Can see the stacks of running tasks")),
        ]
        # Ten besides the primary key, with that of the unique key. Above each stands who reads it. All are partial:
        # every change of a status adds an entry to each index that contains the row, and rows that succeeded, which are
        # most, are in none. These are found along the primary key, because ids grow with the time: by pruning, and by
        # lists and exports of a time.
        indexes = [
            # The claim, and the counts of ready tasks.
            models.Index(
                fields=["queue", "-priority", "id"],
                name="pglock_task_ready",
                condition=Q(status="READY", fair_key__isnull=True),
            ),
            # The claim of tasks with fair=, which asks for the next key in turn.
            models.Index(
                fields=["queue", "fair_key", "-priority", "id"],
                name="pglock_task_fair",
                condition=Q(status="READY", fair_key__isnull=False),
            ),
            # Admission to a lock key: who runs, and who is next. Why a task waits; the list of the tasks of a key.
            models.Index(
                fields=["lock_key", "status", "id"],
                name="pglock_task_lock",
                condition=Q(lock_key__isnull=False, finished_at__isnull=True),
            ),
            # Admission to keys of which one task runs at a time: a task keeps its turn while it waits for its retry, is
            # suspended, or waits for its children. The index above would read each task of the key that is scheduled
            # for later or waits for the key, and there may be a million.
            models.Index(
                fields=["lock_key"],
                name="pglock_task_keeps",
                condition=Q(
                    Q(status="SCHEDULED", started_at__isnull=False) | Q(status="BLOCKED", worker__isnull=False),
                    lock_key__isnull=False,
                ),
            ),
            # Pruning of tasks with keep_result=, each of which has a time of its own.
            models.Index(fields=["expires_at"], name="pglock_task_expires", condition=Q(expires_at__isnull=False)),
            # Promotion of due tasks, and when the next one is due.
            models.Index(fields=["run_after", "id"], name="pglock_task_due", condition=Q(status="SCHEDULED")),
            # Rescue, what is given back after a lost answer, and the page of a worker.
            models.Index(fields=["worker", "id"], name="pglock_task_running", condition=Q(status="RUNNING")),
            # Lists by status, the counts of BLOCKED, SCHEDULED and RUNNING, `locktasks`, the verbs for failed tasks.
            models.Index(fields=["status", "id"], name="pglock_task_attention", condition=~Q(status="SUCCESSFUL")),
            # The page of failures, the retry of a group, and the counts of failed tasks by queue: a count of thousands,
            # with their dates, reads nothing else.
            models.Index(
                fields=["fingerprint", "id"],
                include=["finished_at", "queue"],
                name="pglock_task_fingerprint",
                condition=Q(status="FAILED"),
            ),
        ]
        constraints = [
            # The tenth index, for unique=. With the scope WAITING a task is in it until its first claim, and never
            # again: so neither a retry nor a rescue can violate the constraint.
            models.UniqueConstraint(
                fields=["unique_key"],
                name="pglock_task_unique",
                condition=HAS_UNIQUE_KEY,
            ),
            # One expression for all statuses: PostgreSQL parses each constraint again for each statement. One for
            # each status took an eighth of the time of an INSERT.
            models.CheckConstraint(
                name="pglock_task_status",
                condition=Case(
                    *(When(status=status, then=needs) for status, needs in _NEEDS.items()),
                    default=Value(False),
                    output_field=models.BooleanField(),
                ),
            ),
            models.CheckConstraint(
                name="pglock_task_unique_has_scope",
                condition=Q(unique_key__isnull=True) | Q(unique_scope__isnull=False),
            ),
            # What a plain INSERT may not write: such a task would never run, or each statement that counts the attempts
            # of several tasks would fail. One constraint, because each one costs each statement.
            models.CheckConstraint(
                name="pglock_task_bounds",
                condition=Q(priority__range=(-100, 100))
                & (Q(concurrency__gt=0) | Q(concurrency__lt=0))
                & Q(fair_key__gt="", uncounted__gte=0, attempts__gte=F("uncounted")),
            ),
            # Other programs write this column. One date that cannot be read would break each page that shows the task.
            # A name of its own, which the error quotes: for PostgreSQL as fast as a part of another constraint.
            models.CheckConstraint(name="pglock_task_run_after", condition=Q(run_after__range=READABLE)),
        ]

    def __str__(self) -> str:
        return f"{self.task_path} #{self.pk}"

    def __repr__(self) -> str:
        return f"<Task {self.pk} {str(self.status).lower()} {self.queue!r} attempt {self.attempts_made}>"

    @property
    def attempts_made(self) -> int:
        """How often the function was started, without snoozes; ``attempts`` is the number of claims."""
        # Before the row is saved both fields are expressions: the defaults of the database.
        return 0 if self.pk is None else int(self.attempts - self.uncounted)

    @property
    def name(self) -> str:
        """The name of the function without its module: short enough for a list."""
        return str(self.task_path).rpartition(".")[2]


class Attempt(Row):
    """An attempt that failed, or was lost with its worker. A successful attempt is recorded only in the task."""

    class Outcome(models.TextChoices):
        """How the attempt ended."""

        FAILED = "FAILED", _("Failed")
        LOST = "LOST", _("Lost with its worker")

    id = models.BigAutoField(_("id"), primary_key=True)
    # Without a constraint in the database, which would check each deleted task alone: that took two thirds of the time
    # of pruning. Each statement that deletes tasks deletes their attempts and waiters, too.
    task = models.ForeignKey(
        Task,
        on_delete=models.CASCADE,
        related_name="failures",
        verbose_name=_("task"),
        db_index=False,
        db_constraint=False,
    )
    number = models.IntegerField(_("number"), help_text=_("Number of claims of the task, including this one."))
    worker = models.UUIDField(_("worker"), null=True, help_text=_("Empty: the task never ran."))
    # The row of a worker is deleted when the worker ends.
    worker_name = models.CharField(_("worker"), max_length=128, null=True)
    started_at = models.DateTimeField(_("started at"))
    finished_at = models.DateTimeField(_("finished at"))
    outcome = models.CharField(_("outcome"), max_length=16, choices=Outcome.choices)
    exception_path = models.CharField(_("exception"), max_length=512)
    traceback = models.TextField(_("traceback"))
    cause = models.BigIntegerField(_("because of task"), null=True, help_text=_("Its end has cancelled this task."))
    log = models.TextField(_("log"), null=True)

    for_dumpdata = manager_for_dumpdata()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        ordering = ["task", "number"]
        constraints = [
            models.UniqueConstraint(fields=["task", "number"], name="pglock_attempt_number"),
            models.CheckConstraint(name="pglock_attempt_outcome", condition=models.Q(outcome__in=["FAILED", "LOST"])),
        ]
        # The tasks that were cancelled because of another one.
        indexes = [models.Index(fields=["cause"], name="pglock_attempt_cause", condition=models.Q(cause__isnull=False))]

    def __str__(self) -> str:
        return _("attempt %(number)s of task %(task)s") % {"number": self.number, "task": self.task_id}


class Waiter(Row):
    """One wait for the end of the task ``awaited``, by ``task`` or, if that is None, by a process that listens.

    The row is deleted when the wait is over. Those of ``after_ended=`` and of ``context.gather()`` stay until the
    waiting task has ended, so that pruning keeps what that task reads. ``awaited`` is not a foreign key, so that
    finished tasks can be pruned without a query of this table.
    """

    id = models.BigAutoField(_("id"), primary_key=True)
    awaited = models.BigIntegerField(_("awaited"))
    task = models.ForeignKey(
        Task, on_delete=models.CASCADE, related_name="awaiting", verbose_name=_("task"), null=True, db_constraint=False
    )
    # Null for waits that the end of the awaited task ends.
    has_ended = models.BooleanField(null=True)

    for_dumpdata = manager_for_dumpdata()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("waiter")
        verbose_name_plural = _("waiters")
        default_permissions = ()
        # The sum prevents a search by the task alone from using this index. With wrong statistics, such a search would
        # read the whole index.
        indexes = [models.Index("awaited", models.F("task") + 0, name="pglock_waiter_awaited")]

    def __str__(self) -> str:
        return f"{self.task_id or '?'} → {self.awaited}"
