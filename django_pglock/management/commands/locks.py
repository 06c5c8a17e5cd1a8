"""``manage.py locks``: show advisory locks and leases, end a session, revoke a lease, test whether locks exclude."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Protocol

from django.core.management.base import CommandError, CommandParser
from django.core.serializers.json import DjangoJSONEncoder
from django.db import OperationalError
from django.utils.translation import gettext as _

from django_pglock.conf import get_settings
from django_pglock.errors import ConfigurationError
from django_pglock.management.arguments import WrongArguments, plain_refusals, read_by
from django_pglock.management.terminal import (
    TerminalCommand,
    ago,
    aligned,
    duration_text,
    ignore_broken_pipe,
    printable,
)
from django_pglock.models import AdvisoryLock, Lease
from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.selftest import selftest
from django_pglock.worker.options import amount_of


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
        parser.add_argument(
            "--watch",
            type=read_by(amount_of("seconds")),
            nargs="?",
            const=2.0,
            metavar="SECONDS",
            help=_("Repeat at this interval (default: 2) until Ctrl-C."),
        )
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
        try:
            connection = connection_for(options["database"] or get_settings().USING)
        except ConfigurationError as error:
            raise WrongArguments(str(error)) from error
        if options["selftest"]:
            self._selftest(connection.alias, as_json=options["json"])
            return
        rows = AdvisoryLock.objects.using(connection.alias)
        if options["terminate"] is not None:
            self._terminate(rows, options["terminate"])
            return
        leases = Lease.objects.using(rows.db)
        if options["free_lease"] is not None:
            self._free(leases, options["free_lease"])
            return
        if options["leases"]:
            held = leases.held().with_server_time()
            self._repeat(options, held.filter(name=options["search"]) if options["search"] else held, Leases)
            return
        if options["search"]:
            rows = rows.search(options["search"])
        if options["blocked"]:
            rows = rows.filter(waiters__gt=0)
        self._repeat(options, rows, Locks)

    def _repeat(self, options: dict[str, Any], rows: Any, kind: type[Kind]) -> None:
        """Show the rows, once or again and again."""
        try:
            while True:
                if options["json"]:
                    self._show_json(rows.all(), kind)
                else:
                    self._show_table(rows.all(), kind, options)
                # Python buffers some kilobytes when it writes to a pipe.
                self.stdout.flush()
                if options["watch"] is None:
                    break
                time.sleep(options["watch"])
        except KeyboardInterrupt:
            return
        except BrokenPipeError:
            # The reader, for example head, has closed the pipe. Python would fail again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stdout.fileno())

    def _free(self, leases: Any, name: str) -> None:
        if not leases.filter(name=name).free():
            raise CommandError(_("No lease named %r is held.") % name)
        self.stdout.write(_("The lease was revoked. Its holder notices the loss at its next renewal."))

    def _terminate(self, rows: Any, pid: int) -> None:
        if not rows.terminate(pid):
            raise CommandError(_("Session %d neither holds nor waits for an advisory lock of this database.") % pid)
        self.stdout.write(_("Session %d was ended.") % pid)

    def _selftest(self, using: str, *, as_json: bool) -> None:
        findings = []
        try:
            for finding in selftest(using):
                findings.append(finding)
                if not as_json:
                    mark = {True: _("ok"), False: _("NOT OK"), None: _("not tried")}[finding.is_ok]
                    self.stdout.write(f"{mark:<10} {printable(finding.text)}")
                    self.stdout.flush()
        except OperationalError as error:
            raise CommandError(str(error)) from error
        if as_json:
            self.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2))
        if any(finding.is_needed and finding.is_ok is False for finding in findings):
            raise CommandError(_("Here, locks or claims do not exclude others. See the lines that are not ok."))

    def _show_json(self, rows: Iterable[Any], kind: type[Kind]) -> None:
        found = [{name: getattr(row, name) for name in kind.fields} for row in rows]
        self.stdout.write(json.dumps(found, cls=DjangoJSONEncoder, indent=2))

    def _show_table(self, rows: Iterable[Any], kind: type[Kind], options: dict[str, Any]) -> None:
        lines = [kind.line(row) for row in rows]
        if not lines:
            self.stdout.write(kind.nothing(printable(options["search"] or ""), is_blocked=options["blocked"]))
            return
        for line in aligned(kind.head(), lines):
            self.stdout.write(line)


class Kind(Protocol):
    """How the rows of one model are shown: ``fields`` as JSON, ``head`` and ``line`` as a table."""

    fields: tuple[str, ...]

    @staticmethod
    def head() -> tuple[str, ...]:
        """Return the titles of the columns."""
        ...

    @staticmethod
    def line(row: Any) -> tuple[str, ...]:
        """Return the columns of a row."""
        ...

    @staticmethod
    def nothing(search: str, *, is_blocked: bool) -> str:
        """Return the sentence that is printed if there are no rows: none at all, or none that the arguments select."""
        ...


class Locks:
    """Advisory locks. Waiting sessions are indented below the holder."""

    fields: tuple[str, ...] = (
        *("key", "name", "mode", "is_granted", "pid", "waiters", "blocked_by", "since"),
        *("application_name", "state", "username", "client_address", "query"),
    )

    @staticmethod
    def head() -> tuple[str, ...]:
        """Return the titles of the columns."""
        return (_("LOCK"), _("MODE"), _("SESSION"), _("WAITS FOR"), _("SINCE"), _("APPLICATION"))

    @staticmethod
    def line(row: AdvisoryLock) -> tuple[str, ...]:
        """Return the columns of a lock."""
        name = printable(str(row))
        return (
            name if row.is_granted else f"  ↳ {name}",
            row.mode,
            str(row.pid),
            ", ".join(map(str, row.blocked_by)) or "-",
            ago(row.since),
            row.application_name or "-",
        )

    @staticmethod
    def nothing(search: str, *, is_blocked: bool) -> str:
        """Return the sentence that is printed if there are no rows: none at all, or none that the arguments select."""
        if is_blocked and search:
            return _('No session waits for an advisory lock that "%s" selects.') % search
        if is_blocked:
            return _("No session waits for an advisory lock.")
        if search:
            return _('No advisory lock has a name that begins with "%s", or this key or session.') % search
        return _("No advisory lock is held or awaited.")


class Leases:
    """Leases that are held."""

    fields: tuple[str, ...] = ("name", "owner", "token", "ttl", "acquired_at", "renewed_at", "expires_at")

    @staticmethod
    def head() -> tuple[str, ...]:
        """Return the titles of the columns."""
        return (_("LEASE"), _("OWNER"), _("TOKEN"), _("HELD FOR"), _("RENEWED"), _("EXPIRES IN"))

    @staticmethod
    def line(row: Any) -> tuple[str, ...]:
        """Return the columns of a lease."""
        now = row.server_time
        ends = _("never") if row.expires_at is None else duration_text((row.expires_at - now).total_seconds())
        return (
            *(printable(row.name), printable(row.owner), str(row.token)),
            *(ago(row.acquired_at, now), ago(row.renewed_at, now), ends),
        )

    @staticmethod
    def nothing(search: str, *, is_blocked: bool) -> str:
        """Return the sentence that is printed if there are no rows: none at all, or none that the arguments select."""
        if search:
            return _("No lease named %r is held.") % search
        return _("No lease is held.")
