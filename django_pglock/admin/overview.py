"""The overview: problems as sentences with links, each kind found by a function; queues, workers, and charts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, NamedTuple

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import models, router
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, reverse
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.http import urlencode
from django.utils.text import capfirst, format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_pglock.admin.charts import charts_of, choice_of
from django_pglock.admin.failures import FailureGroup
from django_pglock.admin.pages import AtLeast, PageOnly, ReadOnlyAdmin, capped, elapsed
from django_pglock.admin.schedules import OVERDUE
from django_pglock.conf import get_settings
from django_pglock.models import AdvisoryLock, Event, Lease, Queue, Schedule, Task, Worker
from django_pglock.store.admit import blocked_keys
from django_pglock.store.count import QueueCounts
from django_pglock.store.failures import failures
from django_pglock.store.numbers import BETWEEN_DEPTHS, depths, finished_per_minute
from django_pglock.store.ready import unknown
from django_pglock.store.schedules import known
from django_pglock.store.statements import MOST_COUNTED, in_status
from django_pglock.tasks.backends import our_backends
from django_pglock.tasks.compat import task_backends
from django_pglock.tasks.schedules import is_scheduled
from django_pglock.tasks.states import TaskStatus

#: The number of sentences of one kind, and of tasks of one worker, that are shown. One more sentence says that there
#: are others.
FEW = 3
#: Rows of a table that are shown.
MOST_SHOWN = 20
#: A task that has been ready or blocked for longer than this, and a lock that a session has waited for.
LONG, LONG_FOR_LOCK = timedelta(minutes=10), timedelta(seconds=10)
#: Running tasks, workers and kinds of failures that are read.
MOST_RUNNING, MOST_WORKERS, MOST_GROUPS = 1000, 200, 20
#: Seconds after which the page counts by itself: no worker counts.
MAX_AGE = BETWEEN_DEPTHS + 5
#: Tasks of each queue that are compared with the functions that workers know.
FIRST = 5
#: A user who may view one of these models may view the overview. Each section shows only data that the user may view.
VIEWED = (Task, Worker, Queue, Schedule, AdvisoryLock, Lease, Event)


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


# Problems


class Sentence(NamedTuple):
    """A problem, and the page that shows it. ``key`` stays the same while the problem lasts."""

    key: str
    text: str
    url: str


def attention(facts: Facts) -> Iterator[Sentence]:
    """Yield the problems that the user may see, the most urgent first, and a few of each kind."""
    for model, find in SENTENCES:
        found = list(islice(find(facts), FEW + 1)) if facts.may_view(model) else []
        yield from found[:FEW]
        for other in found[FEW:]:
            yield Sentence(find.__name__, _("There are more problems of this kind."), other.url)


def failing_functions(facts: Facts) -> Iterator[Sentence]:
    """The failures of the last day, by function, exception and place; most failures first."""
    groups = failures(facts.using, limit=MOST_GROUPS)
    for group in sorted((each for each in groups if any(each.by_hour)), key=lambda each: -each.count):
        text = ngettext(
            "%(count)s failure of %(task)s, %(time)s ago: %(exception)s",
            "%(count)s failures of %(task)s, the first %(time)s ago: %(exception)s",
            group.count,
        )
        count = AtLeast(group.count) if group.is_capped else group.count
        place = _("%(exception)s in %(place)s") % {"exception": group.exception, "place": group.place}
        about = {"count": count, "task": group.name, "time": elapsed(group.first_at)}
        about["exception"] = (place if group.place else group.exception) or _("the exception is not known")
        yield Sentence(f"failures:{group.fingerprint}", text % about, facts.address("failuregroup_changelist"))


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
    """Paused queues, and who has paused them and why."""
    for queue in facts.paused.values():
        text = _("Queue %(queue)s has been paused for %(time)s.")
        why = ": ".join(filter(None, (queue.paused_by, queue.reason)))
        text = text % {"queue": queue.pk, "time": elapsed(queue.paused_at)} + (f" ({why})" if why else "")
        yield Sentence(f"paused:{queue.pk}", text, facts.address("queue_changelist", paused=1))


def long_waits(facts: Facts) -> Iterator[Sentence]:
    """Queues whose oldest ready task has waited for long, although they are not paused."""
    now = timezone.now()
    for queue, age in facts.ages.items():
        if age > LONG.total_seconds() and queue not in facts.paused:
            text = _("The oldest ready task of queue %(queue)s has waited for %(time)s.")
            about = {"queue": queue, "time": elapsed(now - timedelta(seconds=age), now)}
            url = facts.address("task_changelist", status__exact="READY", queue=queue)
            yield Sentence(f"waits:{queue}", text % about, url)


def blocked_tasks(facts: Facts) -> Iterator[Sentence]:
    """The oldest blocked task, if it has waited for long, and tasks wait for lock keys, not only for other tasks."""
    blocked = in_status(Task.objects.using(facts.using), TaskStatus.BLOCKED).order_by("status", "pk")
    for key, since in blocked.values_list("pk", "enqueued_at")[:1]:
        if timezone.now() - since > LONG and blocked_keys(facts.using, "", limit=1):
            text = _("Tasks wait for lock keys; the oldest blocked task, #%(id)s, has waited for %(time)s.")
            url = facts.address("task_changelist", status__exact="BLOCKED")
            yield Sentence("blocked", text % {"id": key, "time": elapsed(since)}, url)


def unknown_functions(facts: Facts) -> Iterator[Sentence]:
    """Functions with ready tasks that no living worker knows. Without a worker, all would be unknown."""
    oldest: dict[str, datetime] = {}
    for each in unknown(facts.using, limit=FIRST) if facts.workers else ():
        oldest.setdefault(each.task_path, each.oldest)
    for path, since in oldest.items():
        text = _("No worker knows %(task)s; the oldest of its ready tasks has waited for %(time)s.")
        url = facts.address("task_changelist", status__exact="READY", task_path=path)
        yield Sentence(f"unknown:{path}", text % {"task": path, "time": elapsed(since)}, url)


def overdue_schedules(facts: Facts) -> Iterator[Sentence]:
    """Schedules with a late tick that no worker has enqueued."""
    late = Schedule.objects.using(facts.using).filter(is_enabled=True, next_at__lt=Now() - OVERDUE).order_by("next_at")
    for path, since in late.values_list("pk", "next_at")[: FEW + 1]:
        text = _("The schedule of %(task)s has been overdue for %(time)s: no worker enqueues it.")
        url = facts.address("schedule_changelist", is_enabled__exact=1)
        yield Sentence(f"schedule:{path}", text % {"task": path, "time": elapsed(since)}, url)


def unknown_schedules(facts: Facts) -> Iterator[Sentence]:
    """Schedules that stand in the code, and that no worker knows: only web processes import their modules."""
    tasks = known(facts.using) if facts.workers else {}
    paths = [path for path, task in tasks.items() if is_scheduled(task)]
    rows = Schedule.objects.using(facts.using).filter(pk__in=paths).values_list("pk", flat=True) if paths else ()
    for path in sorted({*paths}.difference(rows)):
        text = _("No worker knows the schedule of %(task)s. Import its module in tasks.py of its app.")
        yield Sentence(f"unknown-schedule:{path}", text % {"task": path}, facts.address("schedule_changelist"))


def awaited_locks(facts: Facts) -> Iterator[Sentence]:
    """Advisory locks for which a session has waited for long; none where a router does not allow the view of locks."""
    if not router.allow_migrate_model(get_settings().USING, AdvisoryLock):
        return
    waiting = AdvisoryLock.objects.all().waiting().filter(key__isnull=False, since__lte=Now() - LONG_FOR_LOCK)
    first = waiting.order_by("key", "since", "pid").distinct("key")
    for row in sorted(first, key=attrgetter("since")):
        text = ngettext(
            "%(count)s session waits for the lock %(lock)s, for %(time)s.",
            "%(count)s sessions wait for the lock %(lock)s, the first for %(time)s.",
            row.waiters,
        )
        about = {"count": row.waiters, "lock": str(row), "time": elapsed(row.since)}
        yield Sentence(f"lock:{row.key}", text % about, facts.address("advisorylock_changelist", is_granted__exact=0))


#: The kinds of problems by urgency, each with the model that a user must be allowed to view.
SENTENCES: tuple[tuple[Any, Callable[[Facts], Iterator[Sentence]]], ...] = (
    (Worker, no_worker),
    (FailureGroup, failing_functions),
    (Task, stuck_tasks),
    (Task, unknown_functions),
    (Queue, paused_queues),
    (Schedule, overdue_schedules),
    (Schedule, unknown_schedules),
    (Task, long_waits),
    (Task, blocked_tasks),
    (AdvisoryLock, awaited_locks),
)


# Tables, and the page


def queue_table(facts: Facts) -> dict[str, Any]:
    """Return the queues, the urgent ones first: with the oldest ready tasks, paused, with running tasks, configured."""
    configured = [queue for backend in task_backends.all() for queue in sorted(backend.queues)]
    running = [queue for queue, each in facts.depths.items() if each.counts["RUNNING"]]
    names = list(dict.fromkeys([*facts.ages, *facts.paused, *running, *configured]))
    rates = finished_per_minute(facts.using, names[:MOST_SHOWN])
    rows = [_queue_row(facts, name, rates.get(name, 0)) for name in names[:MOST_SHOWN]]
    return {"rows": rows, "more": len(names) - len(rows)}


def _queue_row(facts: Facts, name: str, rate: float) -> dict[str, Any]:
    age, depth, now = facts.ages.get(name), facts.depths.get(name), timezone.now()
    row: dict[str, Any] = {"name": name, "is_paused": name in facts.paused}
    row["oldest"] = "-" if age is None else elapsed(now - timedelta(seconds=age), now)
    row["rate"] = f"{rate:,.{0 if rate >= 10 else 1}f}"
    for status in ("READY", "RUNNING", "FAILED"):
        count = depth.counts[status] if depth else 0
        row[status.lower()] = AtLeast(count) if depth and status in depth.at_least else count
        row[f"{status.lower()}_url"] = facts.address("task_changelist", status__exact=status, queue=name)
    return row


def worker_table(facts: Facts) -> dict[str, Any]:
    """Return the workers, those with running tasks first: each with its oldest tasks, and how many more it runs."""
    rows = Task.objects.using(facts.using).filter(status="RUNNING").order_by("worker", "pk")
    rows = rows.only("worker", "task_path", "queue", "last_attempted_at")[:MOST_RUNNING]
    by_worker = groupby(rows if facts.may_view(Task) else [], key=attrgetter("worker"))
    tasks = {worker: list(group) for worker, group in by_worker}
    workers = sorted(facts.workers, key=lambda worker: (worker.pk not in tasks, worker.name))
    shown = []
    for worker in workers[:MOST_SHOWN]:
        oldest = sorted(tasks.get(worker.pk, []), key=attrgetter("last_attempted_at"))
        first = [(task, elapsed(task.last_attempted_at)) for task in oldest[:FEW]]
        shown.append((worker, first, len(oldest) - FEW))
    return {"rows": shown, "more": len(workers) - len(shown)}


class Overview(models.Model):
    """The name under which admin sites list the overview."""

    class Meta(PageOnly):
        verbose_name = gettext_lazy("overview")
        # The index orders models by this name: a space makes the overview the first.
        verbose_name_plural = format_lazy(" {}", capfirst(gettext_lazy("overview")))

    def __str__(self) -> str:
        return str(self._meta.verbose_name)


@admin.register(Overview)
class OverviewAdmin(ReadOnlyAdmin):
    """The page. While it is visible, its script loads it every five seconds, and takes the part that changes."""

    class Media:
        """Without the script, a link loads the page again."""

        js = ("django_pglock/overview.js",)

    def get_urls(self) -> list[URLPattern]:
        """Return the page, under the name of a list so that the admin links to it."""
        return [self.own_path("", "changelist", self.page_view)]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may view any of the pages of this package."""
        facts = Facts(request, self.admin_site)
        return any(facts.may_view(model) for model in VIEWED)

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return whether the index lists the page."""
        return self.has_view_permission(request)

    def page_view(self, request: HttpRequest) -> HttpResponse:
        """Show the sections that the user may view."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        facts = Facts(request, self.admin_site)
        context: dict[str, Any] = {"title": capfirst(self.opts.verbose_name), "sentences": list(attention(facts))}
        if facts.may_view(Task):
            queues = queue_table(facts)
            choice = choice_of(request, {*(each["name"] for each in queues["rows"]), *facts.ages, *facts.paused})
            context |= {"queues": queues, "choice": choice, "charts": charts_of(facts.using, choice)}
        if facts.may_view(Worker):
            context["workers"] = worker_table(facts)
        return self.answer(request, "overview", context)
