"""``manage.py locks``: who holds which advisory lock, who waits, and an end to a session."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.serializers.json import DjangoJSONEncoder
from django.utils import timezone
from django.utils.translation import gettext as _

from django_pglock.conf import get_settings
from django_pglock.models import AdvisoryLock

FIELDS = (
    *("key", "name", "mode", "is_granted", "pid", "waiters", "blocked_by", "since"),
    *("application_name", "state", "username", "client_address", "query"),
)


class Command(BaseCommand):
    """Shows advisory locks of this database."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = _(
            "Show the advisory locks of a database: holders, and under each those who wait for it. A name is shown "
            "where it can be proved; give one to find its lock."
        )

    def add_arguments(self, parser: CommandParser) -> None:
        """Say what can be asked for."""
        parser.add_argument("search", nargs="?", metavar="NAME", help=_("Only this name, key or session."))
        parser.add_argument("--blocked", action="store_true", help=_("Only locks that somebody waits for."))
        parser.add_argument("--json", action="store_true", help=_("Print JSON for programs."))
        parser.add_argument(
            "--watch",
            type=float,
            nargs="?",
            const=2.0,
            metavar="SECONDS",
            help=_("Look again and again, every so many seconds (default: 2), until Ctrl-C."),
        )
        parser.add_argument(
            "--terminate", type=int, metavar="PID", help=_("End this session, if it holds or waits for a lock here.")
        )
        parser.add_argument("--database", help=_("Database alias (default: the setting USING)."))

    def handle(self, *args: Any, **options: Any) -> None:
        """Ask, and show the answer."""
        rows = AdvisoryLock.objects.using(options["database"] or get_settings().USING)
        if options["terminate"] is not None:
            self._terminate(rows, options["terminate"])
            return
        if options["search"]:
            rows = rows.search(options["search"])
        if options["blocked"]:
            rows = rows.filter(waiters__gt=0)
        show = self._show_json if options["json"] else self._show_table
        try:
            while True:
                show(rows.all())
                if options["watch"] is None:
                    break
                time.sleep(options["watch"])
        except KeyboardInterrupt:
            return

    def _terminate(self, rows: Any, pid: int) -> None:
        if not rows.terminate(pid):
            raise CommandError(_("Session %d neither holds nor awaits an advisory lock of this database.") % pid)
        self.stdout.write(_("Session %d was ended.") % pid)

    def _show_json(self, rows: Iterable[AdvisoryLock]) -> None:
        found = [{name: getattr(row, name) for name in FIELDS} for row in rows]
        self.stdout.write(json.dumps(found, cls=DjangoJSONEncoder, indent=2))

    def _show_table(self, rows: Iterable[AdvisoryLock]) -> None:
        lines = [line_of(row) for row in rows]
        if not lines:
            self.stdout.write(_("No advisory lock is held or awaited."))
            return
        head = (_("LOCK"), _("MODE"), _("SESSION"), _("WAITS FOR"), _("SINCE"), _("APPLICATION"))
        widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
        for line in (head, *lines):
            self.stdout.write("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def line_of(row: AdvisoryLock) -> tuple[str, ...]:
    """Return what a table shows of a lock; waiters stand under their holder."""
    name = "".join(each if each.isprintable() else "?" for each in str(row.name or row.key))
    since = f"{(timezone.now() - row.since).total_seconds():.0f} s" if row.since else "-"
    return (
        name if row.is_granted else f"  ↳ {name}",
        row.mode,
        str(row.pid),
        ", ".join(map(str, row.blocked_by)) or "-",
        since,
        row.application_name or "-",
    )
