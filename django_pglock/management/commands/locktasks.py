"""``manage.py locktasks``: show queues and tasks, and apply verbs to them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from django.core.management.base import CommandError, CommandParser, DjangoHelpFormatter
from django.core.serializers.json import DjangoJSONEncoder
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_pglock.conf import PRUNABLE
from django_pglock.management import failures, pausing
from django_pglock.management.arguments import WrongArguments, add_database, chosen_database, plain_refusals, positive
from django_pglock.management.choosing import (
    add_choice,
    add_filters,
    add_queues,
    add_statuses,
    chosen,
    days,
    doubts,
    filtered,
    plain_text,
    task_id,
)
from django_pglock.management.history_output import (
    add_stats_filters,
    chosen_totals,
    head_of_totals,
    total_as_json,
    total_as_line,
)
from django_pglock.management.task_output import (
    LISTED,
    about_task,
    fields_of_task,
    lines_of_fields,
    queue_as_json,
    queue_as_line,
    schedules_of,
    schedules_table,
)
from django_pglock.management.terminal import TerminalCommand, ago, aligned, confirm, ignore_broken_pipe, printable
from django_pglock.models import Task, Worker
from django_pglock.store.count import COUNTED, count_workable, queue_counts
from django_pglock.store.id_range import newest
from django_pglock.store.operate import RETRY, VERBS, Verb
from django_pglock.store.requests_to_worker import request_stack, wait_for_stack
from django_pglock.store.statements import MOST_COUNTED, WINDOW
from django_pglock.tasks.redaction import fields_behind_keys
from django_pglock.tasks.states import TaskStatus

#: Seconds for which `stack` waits for the worker: a few heartbeats of a worker that does not listen.
STACK_TIMEOUT = 15.0


class HelpFormatter(DjangoHelpFormatter):
    """Keeps the lines of the examples and wraps all other text."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Command(TerminalCommand):
    """Shows queues and tasks, and changes tasks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = _(
            "Show queues and tasks, and change tasks. A verb takes ids or filters. With filters it first prints how "
            "many tasks match, and asks for confirmation. A verb changes only tasks that are in the right state at "
            "that moment; it does not change tasks that have changed meanwhile."
        )
        self.examples = _(
            """examples:
  locktasks status                              number of tasks by queue and status
  locktasks list --status FAILED --limit 5      the five latest failed tasks
  locktasks stats --since 1d                    throughput, failures and times by function
  locktasks show 4711                           one task with its attempts and tracebacks
  locktasks stack 4711                          where a running task is in its code
  locktasks retry 4711 4712                     run these two tasks again
  locktasks retry --task send_mail              run failed tasks of one function again; asks first
  locktasks schedules                           when functions run, and how they ended last
  locktasks failures                            what fails, grouped by function, exception and place
  locktasks redrive --exception Refused --rate 10
  locktasks cancel --queue mail --dry-run       how many tasks would be cancelled?
  locktasks move-to-queue --queue mail --to bulk
  locktasks reset --all --yes                   make running tasks of dead workers ready again
  locktasks prune --older-than 30 --status FAILED
  locktasks pause mail --reason "provider is down"
  locktasks resume mail
  locktasks keda --queue mail                   one number, for an autoscaler

"locktasks SUBCOMMAND --help" shows all options. The exit code is 0 on success and 1 on failure."""
        )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Add the examples below the help."""
        return super().create_parser(
            prog_name, subcommand, epilog=self.examples, formatter_class=HelpFormatter, **kwargs
        )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the subcommands and their arguments."""
        verbs = parser.add_subparsers(metavar="SUBCOMMAND", required=True)

        def add(name: str, run: Callable[..., None], help_: str) -> CommandParser:
            sub: CommandParser = verbs.add_parser(name, help=help_, description=help_, formatter_class=HelpFormatter)
            add_database(sub)
            # Django's own options come before the subcommand. These two may also come after it.
            for option in ("--settings", "--pythonpath"):
                sub.add_argument(option, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
            sub.set_defaults(run=run)
            return sub

        self._add_queries(add)
        for verb in VERBS.values():
            parser_of_verb = add(verb.command, partial(self._change, verb), str(verb.help))
            add_choice(parser_of_verb)
            if (extra := verb.extra) is not None:
                parser_of_verb.add_argument(
                    extra.option,
                    dest="value",
                    type=plain_text,
                    metavar=extra.metavar,
                    required=True,
                    help=str(extra.help),
                )
        redrive = add("redrive", self._redrive, _("Retry whole groups of failures, all at once or at a rate."))
        failures.add_redrive(redrive)
        self._add_prune(add)
        pausing.add_pause(
            add("pause", self._pause, _("Pause a queue: workers claim no task from it, and running tasks finish."))
        )
        pausing.add_queue(add("resume", self._resume, _("Resume a queue: workers claim tasks from it again.")))

    def _add_queries(self, add: Callable[..., CommandParser]) -> None:
        status = add(
            "status",
            self._status,
            _("Show the number of tasks by queue and status. Counts stop at %s.") % f"{MOST_COUNTED:,}",
        )
        listing = add("list", self._list, _("List tasks, the newest first."))
        add_filters(listing)
        listing.add_argument("--limit", type=positive, default=20, help=_("Maximum number of tasks (default: 20)."))
        groups = add("failures", self._failures, _("Show the failed tasks grouped by function, exception and place."))
        failures.add_group_filters(groups)
        stats = add("stats", self._stats, _("Show how many attempts ended, and how long they took, by function."))
        add_stats_filters(stats)
        ticks = add("schedules", self._schedules, _("Show the schedules, with the status of the last task of each."))
        show = add("show", self._show, _("Show a task with its attempts and their tracebacks."))
        show.add_argument("id", type=task_id, metavar="ID")
        where = add("stack", self._stack, _("Ask the worker of a running task where the task is in its code."))
        where.add_argument("id", type=task_id, metavar="ID")
        keda = add(
            "keda", self._keda, _("Print the number of tasks that are ready or due in queues that are not paused.")
        )
        add_queues(keda)
        for parser in (status, listing, groups, stats, ticks, show, keda):
            parser.add_argument("--json", action="store_true", help=_("Print JSON."))

    def _add_prune(self, add: Callable[..., CommandParser]) -> None:
        prune = add(
            "prune", self._prune, _("Delete finished tasks that are older than the setting PRUNE_AFTER allows.")
        )
        prune.add_argument(
            "--older-than",
            type=days,
            metavar="DAYS",
            help=_("Delete tasks that finished more than DAYS days ago, instead of PRUNE_AFTER."),
        )
        add_statuses(prune, PRUNABLE)
        prune.add_argument(
            "--dry-run", action="store_true", help=_("Print how many tasks would be deleted, and delete nothing.")
        )
        prune.add_argument(
            "--batch",
            type=positive,
            default=WINDOW,
            help=_("Number of rows that one statement examines (default: %d).") % WINDOW,
        )

    @ignore_broken_pipe()
    @plain_refusals()
    def handle(self, *args: Any, **options: Any) -> None:
        """Run the subcommand."""
        rows = Task.objects.using(chosen_database(options["database"]))
        for doubt in doubts(rows.db, options):
            self.stderr.write(doubt)
        options["run"](rows, options)

    # Subcommands that show

    def _status(self, rows: Any, options: dict[str, Any]) -> None:
        queues = queue_counts(rows.db)
        workers = Worker.objects.using(rows.db).alive().count()
        if options["json"]:
            self._print_json({"queues": [queue_as_json(each) for each in queues], "workers": workers})
            return
        if queues:
            titles = (_("QUEUE"), *COUNTED, _("OLDEST READY"), _("PAUSED"))
            self._print_table(titles, [queue_as_line(each) for each in queues])
        else:
            self.stdout.write(_("No task is waiting, running or failed."))
        self.stdout.write(ngettext("%d worker is alive.", "%d workers are alive.", workers) % workers)
        if not workers and any(queue.counts["READY"] for queue in queues):
            self.stdout.write(_("Tasks are ready, but no worker is alive. Start a worker: manage.py runlockworker"))

    def _list(self, rows: Any, options: dict[str, Any]) -> None:
        wanted = filtered(rows, {**options, "status": None, "older_than": None})
        found = newest(
            wanted.only(*LISTED, "meta", *fields_behind_keys()),
            options["limit"],
            statuses=options["status"] or (),
            days=options["older_than"],
        )
        if options["json"]:
            self._print_json([fields_of_task(row, LISTED) for row in found])
        elif found:
            titles = (_("ID"), _("STATUS"), _("QUEUE"), _("TASK"), _("ATTEMPTS"), _("ENQUEUED"))
            lines = [
                (
                    *(str(row.pk), row.status, printable(row.queue), printable(row.task_path), str(row.attempts_made)),
                    _("%s ago") % ago(row.enqueued_at),
                )
                for row in found
            ]
            self._print_table(titles, lines)
        else:
            self.stdout.write(_("No task matches."))

    def _show(self, rows: Any, options: dict[str, Any]) -> None:
        found = about_task(rows, options["id"])
        if found is None:
            raise CommandError(_("There is no task %d.") % options["id"])
        about, attempts = found
        if options["json"]:
            self._print_json({**about, "failures": attempts})
            return
        log = about.pop("log")
        self._print_fields({name: value for name, value in about.items() if value is not None})
        self._print_text("log:", log)
        for attempt in attempts:
            texts = {f"{name}:": attempt.pop(name) for name in ("traceback", "log")}
            self.stdout.write("")
            self._print_fields(attempt)
            for title, text in texts.items():
                self._print_text(title, text)

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
        self._print_lines(found.text)

    def _failures(self, rows: Any, options: dict[str, Any]) -> None:
        groups = failures.chosen_groups(rows, options)
        if options["json"]:
            self._print_json([dataclasses.asdict(group) for group in groups])
        else:
            self.stdout.write(failures.groups_as_table(groups))

    def _stats(self, rows: Any, options: dict[str, Any]) -> None:
        found, minutes = chosen_totals(rows.db, options)
        if options["json"]:
            self._print_json([total_as_json(each, minutes) for each in found])
        elif found:
            self._print_table(head_of_totals(), [total_as_line(each, minutes) for each in found])
        else:
            self.stdout.write(_("No attempt has ended in this time. Workers write their counts once a minute."))

    def _schedules(self, rows: Any, options: dict[str, Any]) -> None:
        found = schedules_of(rows)
        if options["json"]:
            self._print_json(found)
        else:
            self.stdout.write(schedules_table(found))

    def _keda(self, rows: Any, options: dict[str, Any]) -> None:
        count = count_workable(rows.db, options["queue"] or ())
        self.stdout.write(json.dumps({"tasks": count}) if options["json"] else str(count))

    # Subcommands that change

    def _change(self, verb: Verb, rows: Any, options: dict[str, Any]) -> None:
        value = options.get("value", "")
        try:
            verb.check(rows.db, value)
        except ValueError as error:
            raise WrongArguments(str(error)) from error
        self._apply(verb, chosen(rows, options), options, value)

    def _redrive(self, rows: Any, options: dict[str, Any]) -> None:
        groups = failures.redriven_groups(rows, options)
        tasks = rows.filter(status=TaskStatus.FAILED, fingerprint__in=groups)
        if options["rate"] is None:
            self._apply(RETRY, tasks, options)
        elif self._is_confirmed(RETRY, tasks, options, remark=RETRY.remark(tasks)):
            for said in failures.enqueue_redrives(rows.db, groups, options["rate"]):
                self.stdout.write(said)

    def _apply(self, verb: Verb, tasks: Any, options: dict[str, Any], value: str = "") -> None:
        remark = verb.remark(tasks)
        if not self._is_confirmed(verb, tasks, options, value, remark):
            return
        progress = self._progress() if options["verbosity"] else None
        count = verb.apply(tasks, value, progress)
        self._say_changed(verb, count, options.get("ids", []), *verb.rest(tasks))
        if remark and not _asks(options):
            self.stdout.write(remark)

    def _is_confirmed(self, verb: Verb, tasks: Any, options: dict[str, Any], value: str = "", remark: str = "") -> bool:
        """Say how many tasks a verb would change, and ask, unless the options answer that. Return the answer."""
        if not _asks(options):
            return True
        count = verb.movable(tasks, value)[: MOST_COUNTED + 1].count()
        self.stdout.write("\n".join(filter(None, (verb.message(verb.question, count, most=MOST_COUNTED), remark))))
        if options["dry_run"] or not count:
            return False
        confirm()
        return True

    def _say_changed(self, verb: Verb, count: int, ids: list[int], left_out: int, why: str) -> None:
        left = len(set(ids)) - count - left_out
        if ids and not count:
            raise CommandError(
                why or _("No task with these ids is in a state that allows this. Run: manage.py locktasks show ID")
            )
        self.stdout.write(verb.message(verb.done, count))
        if why:
            self.stdout.write(why)
        if left > 0:
            text = ngettext(
                "%d task was not changed: it does not exist, or is in another state.",
                "%d tasks were not changed: they do not exist, or are in another state.",
                left,
            )
            self.stdout.write(text % left)

    def _prune(self, rows: Any, options: dict[str, Any]) -> None:
        is_dry = options["dry_run"]
        ages = {"older_than": options["older_than"], "statuses": options["status"] or (), "dry_run": is_dry}
        progress = self._progress() if options["verbosity"] else None
        try:
            count = rows.prune(**ages, batch=options["batch"], progress=progress)
        except ValueError as error:
            raise WrongArguments(str(error)) from error
        if is_dry:
            text = ngettext("%s task would be deleted.", "%s tasks would be deleted.", count)
            self.stdout.write(text % (f"{MOST_COUNTED}+" if count > MOST_COUNTED else count))
        else:
            text = ngettext("%d task was deleted.", "%d tasks were deleted.", count)
            self.stdout.write(text % count)

    def _progress(self) -> Callable[[int, int], None]:
        """Return a function that prints the progress every two seconds."""
        said_at = time.monotonic()

        def say(count: int, last: int) -> None:
            nonlocal said_at
            if time.monotonic() - said_at >= 2:
                said_at = time.monotonic()
                self.stderr.write(_("%(count)d tasks so far, up to id %(last)d …") % {"count": count, "last": last})

        return say

    def _pause(self, rows: Any, options: dict[str, Any]) -> None:
        pausing.pause(rows.db, options, say=self.stdout.write, warn=self.stderr.write)

    def _resume(self, rows: Any, options: dict[str, Any]) -> None:
        pausing.resume(rows.db, options, say=self.stdout.write)

    # Output

    def _print_json(self, value: Any) -> None:
        self.stdout.write(json.dumps(value, cls=DjangoJSONEncoder, indent=2))

    def _print_table(self, head: Any, lines: Any) -> None:
        self.stdout.write("\n".join(aligned(head, lines)))

    def _print_text(self, title: str, text: str | None) -> None:
        if text:
            self._print_lines("\n".join((title, *(f"    {each}" for each in text.splitlines()))))

    def _print_lines(self, text: str) -> None:
        self.stdout.write("\n".join(map(printable, text.splitlines())))

    def _print_fields(self, fields: dict[str, Any]) -> None:
        self.stdout.write("\n".join(lines_of_fields(fields)))


def _asks(options: dict[str, Any]) -> bool:
    """Return whether a verb only counts or asks first. A user who gives ids has seen these tasks."""
    return options["dry_run"] or not (options.get("ids") or options["yes"])
