"""What the overview reads, and the problems that it shows: sentences with links, each kind found by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import router
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, ngettext_lazy

from django_pglock.admin.failures import FailureGroup
from django_pglock.admin.pages import AtLeast, capped, elapsed
from django_pglock.admin.schedules import OVERDUE
from django_pglock.conf import get_settings
from django_pglock.models import AdvisoryLock, Queue, Schedule, Task, Worker
from django_pglock.store.admit import blocked_keys
from django_pglock.store.count import QueueCounts
from django_pglock.store.failures import failures
from django_pglock.store.numbers import BETWEEN_DEPTHS, depths, finished_per_minute
from django_pglock.store.ready import unknown
from django_pglock.store.statements import MOST_COUNTED, in_status
from django_pglock.tasks.backends import our_backends
from django_pglock.tasks.states import TaskStatus

#: The number of sentences of one kind that are shown. One more sentence has the number of the others.
FEW = 3
#: A task that has been ready or blocked for longer than this, and a lock that a session has waited for.
LONG, LONG_FOR_LOCK = timedelta(minutes=10), timedelta(seconds=10)
#: Lock keys that are counted, and sessions and rows of other kinds that are read.
MOST_KEYS, MOST_ROWS = 99, 100
#: Running tasks and workers that are read.
MOST_RUNNING, MOST_WORKERS = 1000, 200
#: Seconds after which the page counts by itself: no worker counts.
MAX_AGE = BETWEEN_DEPTHS + 5
#: Kinds of failures that are compared.
MOST_GROUPS = 20
#: Tasks of each queue that are compared with the functions that workers know.
FIRST = 5


class RunningTask(NamedTuple):
    """A task that a worker runs, and since when."""

    worker: UUID
    id: int
    task_path: str
    queue: str
    since: datetime

    @property
    def name(self) -> str:
        """The name of the function without its module."""
        return self.task_path.rpartition(".")[2]


class Facts:
    """What the overview reads, each by one statement with a limit and at most once, and what its user may view."""

    def __init__(self, request: HttpRequest, site: Any) -> None:
        self.request = request
        self.site = site
        self.using = str(Task.objects.db)

    def may_view(self, model: Any) -> bool:
        """Return whether this admin site has pages of the model that the user may view."""
        site = self.site
        return bool(site.is_registered(model) and site.get_model_admin(model).has_view_permission(self.request))

    def address(self, page: str, *arguments: Any, **query: Any) -> str:
        """Return the address of a page, such as ``task_changelist``, with a query string."""
        url = reverse(f"admin:django_pglock_{page}", args=arguments, current_app=self.site.name)
        return f"{url}?{urlencode(query)}" if query else url

    @cached_property
    def workers(self) -> list[Worker]:
        """The living workers, by name, without the functions that they know."""
        alive = Worker.objects.using(self.using).all().alive()
        return list(alive.defer("task_paths").order_by("name", "pk")[:MOST_WORKERS])

    @cached_property
    def running(self) -> list[RunningTask]:
        """Running tasks, by worker and id."""
        rows = Task.objects.using(self.using).filter(status="RUNNING").order_by("worker", "pk")
        fields = ("worker", "pk", "task_path", "queue", "last_attempted_at")
        return [RunningTask(*row) for row in rows.values_list(*fields)[:MOST_RUNNING]]

    @cached_property
    def depths(self) -> Mapping[str, QueueCounts]:
        """The tasks of each queue by status, as counted within the last seconds; those with the oldest ready first."""
        found = depths(self.using, max_age=MAX_AGE)
        return {each.queue: each for each in sorted(found, key=lambda each: -(each.oldest_ready or 0.0))}

    @cached_property
    def ages(self) -> Mapping[str, float]:
        """The queues that have ready tasks, and the age of the oldest in seconds; those with the oldest first."""
        return {queue: each.oldest_ready for queue, each in self.depths.items() if each.oldest_ready is not None}

    @cached_property
    def paused(self) -> Mapping[str, Queue]:
        """The queues that are paused, those for longest first."""
        return {queue.pk: queue for queue in Queue.objects.using(self.using).paused().order_by("paused_at", "name")}

    def rates(self, queues: list[str]) -> dict[str, float]:
        """Return how many tasks of these queues finished in a minute, on average of the last minutes."""
        return finished_per_minute(self.using, queues)


class Sentence(NamedTuple):
    """A problem, and the page that shows it. ``key`` stays the same while the problem lasts."""

    key: str
    text: str
    url: str


def attention(facts: Facts) -> list[Sentence]:
    """Return the problems that the user may see, the most urgent first."""
    return [sentence for model, find in SENTENCES if facts.may_view(model) for sentence in find(facts)]


def failing_functions(facts: Facts) -> Iterator[Sentence]:
    """The failures of the last day, by function, exception and place."""
    groups = failures(facts.using, limit=MOST_GROUPS)
    recent = sorted((each for each in groups if any(each.by_hour)), key=lambda each: -each.count)
    url = facts.address("failuregroup_changelist")
    for group in recent[:FEW]:
        text = ngettext(
            "%(count)s failure of %(task)s since %(since)s: %(exception)s",
            "%(count)s failures of %(task)s since %(since)s: %(exception)s",
            group.count,
        )
        count = AtLeast(group.count) if group.is_capped else group.count
        place = _("%(exception)s in %(place)s") % {"exception": group.exception, "place": group.place}
        about = {"count": count, "task": group.name, "since": _moment(group.first_at)}
        about["exception"] = (place if group.place else group.exception) or _("the exception is not known")
        yield Sentence(f"failures:{group.fingerprint}", text % about, url)
    more = len(recent) - FEW
    yield from _more("failures", AtLeast(more) if len(groups) >= MOST_GROUPS else more, url)


def no_worker(facts: Facts) -> Iterator[Sentence]:
    """No worker is alive. A project without a backend of this package needs none."""
    if not facts.workers and our_backends():
        text = _("No worker is running. Start one: python manage.py runlockworker")
        yield Sentence("no-worker", text, facts.address("worker_changelist"))


def stuck_tasks(facts: Facts) -> Iterator[Sentence]:
    """Tasks whose worker is dead."""
    count = Task.objects.using(facts.using).all().stuck().order_by()[: MOST_COUNTED + 1].count()
    if count:
        text = ngettext(
            "%(count)s running task is stuck: its worker is dead.",
            "%(count)s running tasks are stuck: their workers are dead.",
            count,
        )
        url = facts.address("task_changelist", attention="stuck")
        yield Sentence("stuck", text % {"count": capped(count, MOST_COUNTED)}, url)


def paused_queues(facts: Facts) -> Iterator[Sentence]:
    """Paused queues."""
    url = facts.address("queue_changelist", paused=1)
    for queue in list(facts.paused.values())[:FEW]:
        about = {"queue": queue.pk, "by": queue.paused_by, "since": _moment(queue.paused_at)}
        if queue.paused_by:
            text = _("Queue %(queue)s has been paused by %(by)s since %(since)s.") % about
        else:
            text = _("Queue %(queue)s has been paused since %(since)s.") % about
        reason = _("Reason: %(reason)s") % {"reason": queue.reason} if queue.reason else ""
        yield Sentence(f"paused:{queue.pk}", f"{text} {reason}".strip(), url)
    yield from _more("paused", len(facts.paused) - FEW, url)


def late_tasks(facts: Facts) -> Iterator[Sentence]:
    """The scheduled task that has been due for longest, although workers make due tasks ready within seconds."""
    late = Task.objects.using(facts.using).all().due().filter(run_after__lte=Now() - OVERDUE)
    for key, path, since in late.values_list("pk", "task_path", "run_after")[:1]:
        text = _("The oldest due task has been due for %(time)s, and no worker has made it ready: %(task)s #%(id)s.")
        about = {"time": elapsed(since), "task": path.rpartition(".")[2], "id": key}
        yield Sentence("late", text % about, facts.address("task_change", key))


def long_waits(facts: Facts) -> Iterator[Sentence]:
    """Queues whose oldest ready task has waited for long, although they are not paused."""
    late = {queue: age for queue, age in facts.ages.items() if age > LONG.total_seconds() and queue not in facts.paused}
    now = timezone.now()
    for queue, age in list(late.items())[:FEW]:
        text = _("The oldest ready task of queue %(queue)s has waited for %(time)s.")
        about = {"queue": queue, "time": elapsed(now - timedelta(seconds=age), now)}
        url = facts.address("task_changelist", status__exact="READY", queue=queue)
        yield Sentence(f"waits:{queue}", text % about, url)
    yield from _more("waits", len(late) - FEW, facts.address("task_changelist", status__exact="READY"))


def blocked_tasks(facts: Facts) -> Iterator[Sentence]:
    """The lock keys for which tasks wait, if the oldest of these tasks has waited for long."""
    blocked = in_status(Task.objects.using(facts.using), TaskStatus.BLOCKED).order_by("status", "pk")
    for key, since in blocked.values_list("pk", "enqueued_at")[:1]:
        keys = len(blocked_keys(facts.using, "", limit=MOST_KEYS + 1))
        if timezone.now() - since < LONG or not keys:
            return
        text = ngettext(
            "Tasks wait for %(count)s lock key; the oldest blocked task, #%(id)s, has waited for %(time)s.",
            "Tasks wait for %(count)s lock keys; the oldest blocked task, #%(id)s, has waited for %(time)s.",
            keys,
        )
        about = {"count": capped(keys, MOST_KEYS), "id": key, "time": elapsed(since)}
        yield Sentence("blocked", text % about, facts.address("task_changelist", status__exact="BLOCKED"))


def unknown_functions(facts: Facts) -> Iterator[Sentence]:
    """Functions with ready tasks that no living worker knows. Without a worker, all would be unknown."""
    found = unknown(facts.using, limit=FIRST) if facts.workers else []
    oldest: dict[str, datetime] = {}
    for each in found:
        oldest.setdefault(each.task_path, each.oldest)
    for path, since in list(oldest.items())[:FEW]:
        text = _("No worker knows %(task)s; the oldest of its ready tasks has waited for %(time)s.")
        url = facts.address("task_changelist", status__exact="READY", task_path=path)
        yield Sentence(f"unknown:{path}", text % {"task": path, "time": elapsed(since)}, url)
    yield from _more("unknown", len(oldest) - FEW, facts.address("task_changelist", status__exact="READY"))


def overdue_schedules(facts: Facts) -> Iterator[Sentence]:
    """Schedules with a late tick that no worker has enqueued."""
    late = Schedule.objects.using(facts.using).filter(is_enabled=True, next_at__lt=Now() - OVERDUE).order_by("next_at")
    found = list(late.values_list("pk", "next_at")[: MOST_ROWS + 1])
    url = facts.address("schedule_changelist", is_enabled__exact=1)
    for path, since in found[:FEW]:
        text = _("The schedule of %(task)s has been overdue for %(time)s: no worker enqueues it.")
        yield Sentence(f"schedule:{path}", text % {"task": path, "time": elapsed(since)}, url)
    yield from _more("schedule", len(found) - FEW, url)


def awaited_locks(facts: Facts) -> Iterator[Sentence]:
    """Advisory locks for which a session has waited for long; none where a router does not allow the view of locks."""
    if not router.allow_migrate_model(get_settings().USING, AdvisoryLock):
        return
    waiting = AdvisoryLock.objects.all().waiting().filter(key__isnull=False, since__lte=Now() - LONG_FOR_LOCK)
    first: dict[int, Any] = {}
    for each in waiting.order_by("since", "pid")[:MOST_ROWS]:
        first.setdefault(each.key, each)
    url = facts.address("advisorylock_changelist", is_granted__exact=0)
    for row in list(first.values())[:FEW]:
        text = ngettext(
            "%(count)s session waits for the lock %(lock)s, for %(time)s.",
            "%(count)s sessions wait for the lock %(lock)s, the first for %(time)s.",
            row.waiters,
        )
        about = {"count": row.waiters, "lock": str(row), "time": elapsed(row.since)}
        yield Sentence(f"lock:{row.key}", text % about, url)
    yield from _more("lock", len(first) - FEW, url)


#: The kinds of problems by urgency, each with the model that a user must be allowed to view.
SENTENCES: tuple[tuple[Any, Callable[[Facts], Iterator[Sentence]]], ...] = (
    (Worker, no_worker),
    (FailureGroup, failing_functions),
    (Task, stuck_tasks),
    (Task, unknown_functions),
    (Queue, paused_queues),
    (Task, late_tasks),
    (Schedule, overdue_schedules),
    (Task, long_waits),
    (Task, blocked_tasks),
    (AdvisoryLock, awaited_locks),
)


#: What is said about those of a kind that are not shown.
_MORE = {
    "failures": ngettext_lazy("%(count)s more kind of failure.", "%(count)s more kinds of failures.", "count"),
    "paused": ngettext_lazy("%(count)s more queue is paused.", "%(count)s more queues are paused.", "count"),
    "waits": ngettext_lazy(
        "%(count)s more queue has had a ready task for more than 10 minutes.",
        "%(count)s more queues have had a ready task for more than 10 minutes.",
        "count",
    ),
    "unknown": ngettext_lazy(
        "No worker knows %(count)s more function.", "No worker knows %(count)s more functions.", "count"
    ),
    "schedule": ngettext_lazy("%(count)s more schedule is overdue.", "%(count)s more schedules are overdue.", "count"),
    "lock": ngettext_lazy("Sessions wait for %(count)s more lock.", "Sessions wait for %(count)s more locks.", "count"),
}


def _more(kind: str, count: int, url: str) -> list[Sentence]:
    return [Sentence(kind, _MORE[kind] % {"count": count}, url)] if count > 0 else []


def _moment(at: Any) -> str:
    """Return the time of a moment, with its date if that is not today."""
    now = timezone.now()
    if timezone.is_aware(at):
        at, now = timezone.localtime(at), timezone.localtime(now)
    return str(at.strftime("%H:%M" if at.date() == now.date() else "%Y-%m-%d %H:%M"))
