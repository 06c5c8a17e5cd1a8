"""``manage.py locks``: show advisory locks and leases, end a session, revoke a lease, test whether locks exclude."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _

from django_pglock.conf import get_settings
from django_pglock.management import tables
from django_pglock.management.arguments import plain_refusals, wrong_arguments
from django_pglock.management.selftest import selftest
from django_pglock.management.terminal import TerminalCommand, ignore_broken_pipe
from django_pglock.models import AdvisoryLock, Lease
from django_pglock.postgres.connections import connection_for


class Command(TerminalCommand):
    """Shows the advisory locks of a database."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = _(
            "Show the advisory locks of a database: each holder, and below it the sessions that wait. The name of a "
            "lock is shown if a statement of its holder or of a waiting session contains it. Give a name to find the "
            "lock by its key."
        )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        parser.add_argument("search", nargs="?", metavar="NAME", help=_("Only locks of this name, key or session."))
        parser.add_argument("--json", action="store_true", help=_("Print JSON."))
        ways = parser.add_mutually_exclusive_group()
        ways.add_argument("--blocked", action="store_true", help=_("Only locks for which a session waits."))
        ways.add_argument(
            "--terminate",
            type=int,
            metavar="PID",
            help=_("End this session, if it holds or waits for an advisory lock."),
        )
        ways.add_argument(
            "--leases", action="store_true", help=_("Show leases instead: rows with an owner and an expiry.")
        )
        ways.add_argument(
            "--free-lease",
            metavar="NAME",
            help=_("Revoke this lease. Its holder notices the loss at its next renewal."),
        )
        ways.add_argument(
            "--selftest",
            action="store_true",
            help=_(
                "Test with two clients which locks and claims exclude each other on this server. Exit code 1 if some "
                "that your settings need do not."
            ),
        )
        parser.add_argument("--database", help=_("Database alias (default: the setting USING)."))

    @ignore_broken_pipe()
    @plain_refusals()
    def handle(self, *args: Any, **options: Any) -> None:
        """Show rows, end a session or take a lease away."""
        with wrong_arguments():
            using = connection_for(options["database"] or get_settings().USING).alias
        rows, leases = AdvisoryLock.objects.using(using), Lease.objects.using(using)
        if options["selftest"]:
            self._selftest(using)
        elif options["terminate"] is not None:
            self._terminate(rows, options["terminate"])
        elif options["free_lease"] is not None:
            self._free(leases, options["free_lease"])
        elif options["leases"]:
            self._show_leases(leases.held().with_state(), options)
        else:
            self._show_locks(rows, options)

    def _show_locks(self, rows: Any, options: dict[str, Any]) -> None:
        if options["search"]:
            rows = rows.search(options["search"])
        if options["blocked"]:
            rows = rows.filter(waiters__gt=0)
        is_chosen = options["search"] or options["blocked"]
        nothing = _("No advisory lock matches.") if is_chosen else _("No advisory lock is held or awaited.")
        fields = list(map(tables.fields_of, rows))
        self.print_rows(fields, tables.LOCKS, nothing, as_json=options["json"])

    def _show_leases(self, rows: Any, options: dict[str, Any]) -> None:
        if options["search"]:
            rows = rows.filter(name=options["search"])
        nothing = _("No lease matches.") if options["search"] else _("No lease is held.")
        fields = [{**tables.fields_of(row), "server_time": row.server_time} for row in rows]
        self.print_rows(fields, tables.LEASES, nothing, as_json=options["json"])

    def _free(self, leases: Any, name: str) -> None:
        if not leases.filter(name=name).free():
            raise CommandError(_("No lease named %r is held.") % name)
        self.stdout.write(_("The lease was revoked. Its holder notices the loss at its next renewal."))

    def _terminate(self, rows: Any, pid: int) -> None:
        if not rows.terminate(pid):
            raise CommandError(_("Session %d neither holds nor waits for an advisory lock of this database.") % pid)
        self.stdout.write(_("Session %d was ended.") % pid)

    def _selftest(self, using: str) -> None:
        marks = {True: _("ok"), False: _("NOT OK"), None: _("not tried")}
        findings = list(selftest(using))
        self.stdout.write("\n".join(f"{marks[is_ok]:<10} {text}" for text, is_ok in findings))
        if any(is_ok is False for _text, is_ok in findings):
            raise CommandError(_("Here, locks or claims do not exclude others. See the lines that are not ok."))
