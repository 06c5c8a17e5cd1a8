"""``manage.py locktasks``: show queues and tasks, and apply verbs to them."""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_pglock.conf import MOST_DAYS
from django_pglock.management import tables
from django_pglock.management.arguments import WrongArguments, json_value, number, plain_refusals, wrong_arguments
from django_pglock.management.terminal import TerminalCommand, confirm, ignore_broken_pipe, printable
from django_pglock.models import Queue, Task, Worker
from django_pglock.postgres.connections import connection_for
from django_pglock.store.bulk import HIGHEST_RATE, LOWEST_RATE, enqueue_redrive
from django_pglock.store.dependants import Related
from django_pglock.store.failures import MOST_FOUND, FailureCounts, failures
from django_pglock.store.id_range import newest
from django_pglock.store.numbers import totals
from django_pglock.store.operate import DELETE, RETRY, VERBS, Offer, Verb, check_target
from django_pglock.store.ready import unknown, unserved_queues
from django_pglock.store.requests_to_worker import request_stack, wait_for_stack
from django_pglock.store.statements import MOST_COUNTED
from django_pglock.store.steps import emit
from django_pglock.tasks import registry
from django_pglock.tasks.backends import database_of_tasks
from django_pglock.tasks.redaction import fields_behind_keys
from django_pglock.tasks.states import TaskStatus

#: Seconds for which `stack` waits for the worker: a few heartbeats of a worker that does not listen.
STACK_TIMEOUT = 15.0

#: The id of a task, and other numbers that PostgreSQL calls ``bigint``.
ID = number(int, 0, 2**63 - 1)
DAYS = number(float, 0, MOST_DAYS)

#: The options that filter tasks and failures: the name of their value, its type, and their help.
FILTERS: dict[str, tuple[str | None, Callable[[str], Any], Any]] = {
    "--queue": ("NAME", str, gettext_lazy("Only tasks of this queue. Can be repeated.")),
    "--task": (
        "FUNCTION",
        str,
        gettext_lazy("Only tasks of this function: its path, or its name without the module. Can be repeated."),
    ),
    "--status": (None, str.upper, gettext_lazy("Only tasks in this status. Can be repeated.")),
    "--older-than": (
        "DAYS",
        DAYS,
        gettext_lazy("Only tasks enqueued more than DAYS days ago; 0.5 is twelve hours."),
    ),
    "--fingerprint": ("NUMBER", ID, gettext_lazy("Only the group of failures with this number. Can be repeated.")),
    "--exception": (
        "CLASS",
        str,
        gettext_lazy("Only failures with this exception: its path, or its name without the module. Can be repeated."),
    ),
}
#: The filters of tasks, and those of groups of failures.
OF_TASKS = ("--queue", "--task", "--status", "--older-than")
OF_FAILURES = ("--fingerprint", "--task", "--exception")


class Command(TerminalCommand):
    """Shows queues and tasks, and changes tasks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = _(
            "Show queues and tasks, and change tasks. A verb takes ids or filters. With filters it first prints how "
            "many tasks match, and asks for confirmation. A verb changes only tasks that are in the right state at "
            "that moment; it does not change tasks that have changed meanwhile."
        )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the subcommands and their arguments."""
        self.subcommands = parser.add_subparsers(metavar="SUBCOMMAND", required=True)
        self._add_queries()
        self._add_verbs()
        self._add_others()

    def _add(self, name: str, run: Callable[..., None], help_: str, *filters: str) -> CommandParser:
        """Add a subcommand, and the options that filter its rows."""
        added: CommandParser = self.subcommands.add_parser(name, help=help_, description=help_)
        added.set_defaults(run=run)
        added.add_argument(
            "--database", help=_("Database alias of the tasks (default: the one that the backends in TASKS use).")
        )
        # Django's own options come before the subcommand. These two may also come after it.
        for option in ("--settings", "--pythonpath"):
            added.add_argument(option, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        add_filters(added, *filters)
        return added

    def _add_query(self, *arguments: Any) -> CommandParser:
        added = self._add(*arguments)
        added.add_argument("--json", action="store_true", help=_("Print JSON."))
        return added

    def _add_queries(self) -> None:
        text = _("Show the number of tasks by queue and status. Counts stop at %s.") % f"{MOST_COUNTED:,}"
        self._add_query("status", self._status, text)
        listing = self._add_query("list", self._list, _("List tasks, the newest first."), *OF_TASKS)
        listing.add_argument(
            "--limit", type=number(int, 1, 1_000_000), default=20, help=_("Maximum number of tasks (default: 20).")
        )
        text = _("Only tasks that sleep, or wait for an event or for their children.")
        listing.add_argument("--suspended", action="store_true", help=text)
        text = _("Show the failed tasks grouped by function, exception and place.")
        self._add_query("failures", self._failures, text, *OF_FAILURES)
        text = _("Show how many attempts ended, and how long they took, by function.")
        stats = self._add_query("stats", self._stats, text, "--queue", "--task")
        text = _("How many hours to look back (default: 1). More than three hours are read by the hour.")
        stats.add_argument("--hours", type=number(float, 0.02, 24 * MOST_DAYS), default=1.0, metavar="HOURS", help=text)
        text = _("Show the schedules, with the status of the last task of each.")
        self._add_query("schedules", self._schedules, text)
        show = self._add_query("show", self._show, _("Show a task with its steps, its attempts and their tracebacks."))
        text = _("Ask the worker of a running task where the task is in its code.")
        for parser in (show, self._add("stack", self._stack, text)):
            parser.add_argument("id", type=ID, metavar="ID")

    def _add_verbs(self) -> None:
        for verb in VERBS.values():
            added = self._add(verb.command, partial(self._change, verb), str(verb.help))
            add_choice(added)
            add_offer(added, verb.offer)
            if verb.takes_queue:
                added.add_argument("--to", dest="value", metavar="QUEUE", required=True, help=_("The other queue."))

    def _add_others(self) -> None:
        text = _("Retry whole groups of failures, all at once or at a rate.")
        redrive = self._add("redrive", self._redrive, text, *OF_FAILURES)
        text = _("Retry at most N tasks of a group a second, in the background. Default: all at once, by this command.")
        redrive.add_argument("--rate", type=number(float, LOWEST_RATE, HIGHEST_RATE), metavar="N", help=text)
        add_offer(redrive, RETRY.offer)
        add_questions(redrive)
        text = _("Delete finished tasks that are older than the setting PRUNE_AFTER allows.")
        prune = self._add("prune", self._prune, text, "--status")
        text = _("Delete tasks that finished more than DAYS days ago, instead of PRUNE_AFTER.")
        prune.add_argument("--older-than", type=DAYS, metavar="DAYS", help=text)
        add_dry_run(prune)
        text = _("Emit an event: the tasks that wait for it continue. An event that is there already is not changed.")
        emitting = self._add("emit", self._emit, text)
        emitting.add_argument("name", metavar="NAME", help=_("The name of the event, such as packed:7."))
        text = _("What wait_for() returns, as JSON, such as '{\"weight\": 3}'; default: null.")
        emitting.add_argument("payload", nargs="?", type=json_value, metavar="JSON", help=text)
        text = _("Pause a queue: workers claim no task from it, and running tasks finish.")
        pause = self._add("pause", self._pause, text)
        pause.add_argument("--reason", default="", help=_("Why the queue is paused; shown in the admin."))
        for parser in (
            pause,
            self._add("resume", self._resume, _("Resume a queue: workers claim tasks from it again.")),
        ):
            parser.add_argument("queue", nargs=1, metavar="QUEUE")

    @ignore_broken_pipe()
    @plain_refusals()
    def handle(self, *args: Any, **options: Any) -> None:
        """Run the subcommand."""
        with wrong_arguments():
            using = options["database"] or database_of_tasks(option="--database")
            rows = Task.objects.using(connection_for(using).alias)
        for doubt in doubts(rows.db, options):
            self.stderr.write(doubt)
        options["run"](rows, options)

    # Subcommands that show

    def _status(self, rows: Any, options: dict[str, Any]) -> None:
        queues = tables.queues_of(rows.db)
        workers = Worker.objects.using(rows.db).alive().count()
        if options["json"]:
            self.print_json({"queues": queues, "workers": workers})
            return
        self.print_rows(queues, tables.QUEUES, _("No task is waiting, running or failed."), as_json=False)
        self.stdout.write(ngettext("%d worker is alive.", "%d workers are alive.", workers) % workers)
        if not workers and any(queue["ready"] for queue in queues):
            self.stdout.write(_("Tasks are ready, but no worker is alive. Start a worker: manage.py runlockworker"))
        if workers:
            self._print_what_no_worker_runs(rows.db)

    def _print_what_no_worker_runs(self, using: str) -> None:
        text = _("No worker knows %(task)s, which ready tasks call. Was it renamed, or is its module not imported?")
        for path in sorted({each.task_path for each in unknown(using)}):
            self.stdout.write(text % {"task": path})
        text = _("No worker serves the queue %(queue)s, which has ready tasks: manage.py runlockworker %(queue)s")
        for queue in unserved_queues(using):
            self.stdout.write(text % {"queue": queue})

    def _list(self, rows: Any, options: dict[str, Any]) -> None:
        wanted = filtered(rows, {**options, "status": None, "older_than": None})
        if options["suspended"]:
            wanted = wanted.suspended()
            options["status"] = options["status"] or [TaskStatus.SCHEDULED.value, TaskStatus.BLOCKED.value]
        found = newest(
            wanted.only(*tables.LISTED, "meta", *fields_behind_keys()),
            options["limit"],
            statuses=options["status"] or (),
            days=options["older_than"],
        )
        fields = list(map(tables.fields_of_task, found))
        self.print_rows(fields, tables.TASKS, _("No task matches."), as_json=options["json"])

    def _show(self, rows: Any, options: dict[str, Any]) -> None:
        task = rows.filter(pk=options["id"]).first()
        if task is None:
            raise CommandError(_("There is no task %d.") % options["id"])
        about = tables.about_task(task, rows.db)
        if options["json"]:
            self.print_json(about)
            return
        steps, failures = about.pop("steps"), about.pop("failures")
        self.stdout.write("\n".join(tables.lines_of_fields(about)))
        if steps:
            self.stdout.write("")
            self.print_rows(steps, tables.STEPS, "", as_json=False)
        for each in failures:
            self.stdout.write("\n" + "\n".join(tables.lines_of_fields(each)))

    def _stack(self, rows: Any, options: dict[str, Any]) -> None:
        id_ = options["id"]
        if not request_stack(rows.db, id_):
            exists = rows.filter(pk=id_).exists()
            raise CommandError((_("Task %d is not running.") if exists else _("There is no task %d.")) % id_)
        found = wait_for_stack(rows.db, id_, timeout=STACK_TIMEOUT)
        if found is None or found.text is None:
            raise CommandError(
                _(
                    "The worker has not answered. No answer comes while the function is in C code that lets no other "
                    "thread run, and while the worker cannot reach the database."
                )
            )
        if not found.text:
            raise CommandError(_("The function of task %d does not run: it has not begun, or it has ended.") % id_)
        self.stdout.write("\n".join(map(printable, found.text.splitlines())))

    def _failures(self, rows: Any, options: dict[str, Any]) -> None:
        groups = list(map(asdict, chosen_groups(rows.db, options)))
        self.print_rows(groups, tables.FAILURES, _("No task has failed."), as_json=options["json"])

    def _stats(self, rows: Any, options: dict[str, Any]) -> None:
        now, queues, hours = timezone.now(), options["queue"], options["hours"]
        found = [
            tables.stats_of(each, hours * 60)
            for each in totals(rows.db, now - timedelta(hours=hours), now)
            if (not queues or each.queue in queues) and is_named(each.task_path, options["task"])
        ]
        nothing = _("No attempt has ended in this time. Workers write their counts once a minute.")
        self.print_rows(found, tables.STATS, nothing, as_json=options["json"])

    def _schedules(self, rows: Any, options: dict[str, Any]) -> None:
        nothing = _("There is no schedule. A worker writes the schedules of the functions that it knows.")
        self.print_rows(tables.schedules_of(rows.db), tables.SCHEDULES, nothing, as_json=options["json"])

    # Subcommands that change

    def _change(self, verb: Verb, rows: Any, options: dict[str, Any]) -> None:
        value = options.get("value", "")
        with wrong_arguments():
            verb.check(rows.db, value)
        self._apply(verb, chosen(rows, options), options, value)

    def _redrive(self, rows: Any, options: dict[str, Any]) -> None:
        if not any(options[name] for name in ("fingerprint", "task", "exception")):
            raise WrongArguments(_("No failures are selected. Give --fingerprint, --task or --exception."))
        groups = [each.fingerprint for each in chosen_groups(rows.db, options)]
        tasks = rows.filter(status=TaskStatus.FAILED, fingerprint__in=groups)
        if options["rate"] is None:
            self._apply(RETRY, tasks, options)
        elif self._is_confirmed(RETRY, tasks, options, related=self._related(RETRY, tasks, options)):
            for group in groups:
                self._enqueue_redrive(rows.db, group, options)

    def _enqueue_redrive(self, using: str, group: int, options: dict[str, Any]) -> None:
        with wrong_arguments():
            made, is_new = enqueue_redrive(using, group, options["rate"], dependants=options["dependants"])
        text = _("Task %(id)d retries the failures of group %(group)d. To stop it: manage.py locktasks cancel %(id)d")
        if not is_new:
            text = _("Task %(id)d retries the failures of group %(group)d already. Cancel it to change the rate.")
        self.stdout.write(text % {"id": made, "group": group})

    def _apply(self, verb: Verb, tasks: Any, options: dict[str, Any], value: str = "") -> None:
        related = self._related(verb, tasks, options)
        if not self._is_confirmed(verb, tasks, options, value, related=related):
            return
        count, ids = verb.apply(tasks, value, related.ids), {*options.get("ids", []), *related.ids}
        if ids and not count:
            raise CommandError(
                _("No task with these ids is in a state that allows this. Run: manage.py locktasks show ID")
            )
        self.stdout.write(verb.message(verb.done, count))
        if (left := len(ids) - count) > 0:
            self.stdout.write(verb.message(verb.unchanged, left))

    def _related(self, verb: Verb, tasks: Any, options: dict[str, Any]) -> Related:
        """Return the other tasks to change as well. Without the option, they are only offered."""
        if verb.offer is None:
            return Related()
        related = verb.related(tasks)
        if related.remark:
            self.stdout.write(related.remark)
        return related if options[verb.offer.option] else Related()

    def _is_confirmed(
        self, verb: Verb, tasks: Any, options: dict[str, Any], value: str = "", *, related: Related
    ) -> bool:
        """Say how many tasks a verb would change, and ask, unless the options answer that. Return the answer."""
        # A user who gives ids has seen these tasks.
        if not options["dry_run"] and (options.get("ids") or options["yes"]):
            return True
        count = verb.movable(tasks, value)[: MOST_COUNTED + 1].count()
        self.stdout.write(verb.message(verb.question, count, most=MOST_COUNTED))
        if verb.offer and related.ids:
            self.stdout.write(verb.message(verb.offer.text, len(related.ids)))
        if options["dry_run"] or not count:
            return False
        confirm()
        return True

    def _prune(self, rows: Any, options: dict[str, Any]) -> None:
        is_dry = options["dry_run"]
        ages = {"older_than": options["older_than"], "statuses": options["status"] or (), "dry_run": is_dry}
        with wrong_arguments():
            count = rows.prune(**ages)
        text, most = (DELETE.question, MOST_COUNTED) if is_dry else (DELETE.done, None)
        self.stdout.write(DELETE.message(text, count, most=most))

    def _emit(self, rows: Any, options: dict[str, Any]) -> None:
        with wrong_arguments():
            is_new = emit(options["name"], options["payload"], using=rows.db)
        text = _("Event %r was emitted.") if is_new else _("Event %r is there already, so nothing was changed.")
        self.stdout.write(text % options["name"])

    def _pause(self, rows: Any, options: dict[str, Any]) -> None:
        [queue] = options["queue"]
        with wrong_arguments():
            is_new = Queue.objects.db_manager(rows.db).pause(queue, by=name_of_user(), reason=options["reason"])
        self.stdout.write((_("Queue %r was paused.") if is_new else _("Queue %r is paused already.")) % queue)

    def _resume(self, rows: Any, options: dict[str, Any]) -> None:
        [queue] = options["queue"]
        with wrong_arguments():
            was_paused = Queue.objects.db_manager(rows.db).resume(queue)
        if not was_paused:
            raise CommandError(_("Queue %r is not paused.") % queue)
        self.stdout.write(_("Queue %r was resumed.") % queue)


def chosen_groups(using: str, options: dict[str, Any]) -> list[FailureCounts]:
    """Return the groups of failures that match the options."""
    numbers = options["fingerprint"]
    return [
        group
        for group in failures(using, limit=MOST_FOUND)
        if (not numbers or group.fingerprint in numbers)
        and is_named(group.task_path, options["task"])
        and is_named(group.exception_path, options["exception"])
    ]


def name_of_user() -> str:
    """Return the name of the system user. A user without a name, as in some containers, is called locktasks."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "locktasks"


# The selection of tasks: ids or filters, as arguments and as a queryset


def add_filters(parser: CommandParser, *options: str) -> None:
    """Add some of the options that filter."""
    for option in options:
        metavar, read, text = FILTERS[option]
        action = "store" if option == "--older-than" else "append"
        choices = TaskStatus.values if option == "--status" else None
        parser.add_argument(option, action=action, metavar=metavar, type=read, choices=choices, help=str(text))


def add_choice(parser: CommandParser) -> None:
    """Add the arguments that select the tasks of a verb."""
    parser.add_argument("ids", nargs="*", type=ID, metavar="ID", help=_("The id of a task."))
    add_filters(parser, *OF_TASKS)
    parser.add_argument("--all", action="store_true", help=_("All tasks that can be changed in this way."))
    add_questions(parser)


def add_offer(parser: CommandParser, offer: Offer | None) -> None:
    """Add the option that changes related tasks as well, and the one that does not."""
    if offer is not None:
        action = argparse.BooleanOptionalAction
        parser.add_argument(f"--{offer.option}", action=action, default=offer.is_preset, help=offer.help)


def add_questions(parser: CommandParser) -> None:
    """Add the options --yes and --dry-run."""
    parser.add_argument("--yes", action="store_true", help=_("Do not ask for confirmation."))
    add_dry_run(parser)


def add_dry_run(parser: CommandParser) -> None:
    """Add the option --dry-run."""
    text = _("Print how many tasks would be changed, and change nothing.")
    parser.add_argument("--dry-run", action="store_true", help=text)


def filtered(rows: Any, options: dict[str, Any]) -> Any:
    """Return the tasks that match the filters."""
    if options["queue"]:
        rows = rows.filter(queue__in=options["queue"])
    if options["status"]:
        rows = rows.filter(status__in=options["status"])
    if options["older_than"] is not None:
        rows = rows.filter(enqueued_at__lt=Now() - timedelta(days=options["older_than"]))
    if options["task"]:
        named = Q(task_path__in=options["task"])
        for name in options["task"]:
            named |= Q(task_path__endswith=f".{name}")
        rows = rows.filter(named)
    return rows


def is_named(path: str, names: Collection[str] | None) -> bool:
    """Return whether one of the names is this path or its end. Without names, everything is."""
    return not names or any(f".{path}".endswith(f".{name}") for name in names)


def doubts(using: str, options: dict[str, Any]) -> Iterator[str]:
    """Yield which names of the filters are perhaps typing errors: "0 tasks" alone would not say so."""
    for queue in options.get("queue") or ():
        try:
            check_target(using, queue)
        except ValueError as error:  # noqa: PERF203 - there are few names
            yield str(error)
    known = {name for path in registry.known_paths() for name in (path, path.rpartition(".")[2])}
    for name in options.get("task") or ():
        if name not in known:
            yield _("This process knows no task function %r.") % name


def chosen(rows: Any, options: dict[str, Any]) -> Any:
    """Return the selected tasks.

    Raises ``WrongArguments`` unless there is one of these: ids, filters or --all.
    """
    has_filters = any(options[name] for name in ("queue", "task", "status")) or options["older_than"] is not None
    if sum(map(bool, (options["ids"], has_filters, options["all"]))) != 1:
        raise WrongArguments(
            _("Select tasks by one of these: ids, filters (--queue, --task, --status, --older-than) or --all.")
        )
    return rows.filter(pk__in=options["ids"]) if options["ids"] else filtered(rows, options)
