"""``manage.py systems``: run one of the five systems and show what it proves."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

from django.apps import apps
from django.core.management import BaseCommand, CommandError, CommandParser, call_command

from django_pglock.models import Task
from example_project.demo.processes import Fleet
from example_project.demo.screen import Screen, counted
from example_project.systems import NAMES
from example_project.systems.harness import Harness


class Command(BaseCommand):
    """Plays one system and shows the evidence."""

    help = (
        "Run one of the five systems of example_project/systems with real processes, then ask the database what became "
        "of it. Ends with 1 if any claim does not hold. Uses a private PostgreSQL unless DATABASE_URL is set; that "
        "database must have no tasks and no rows of the system yet. Without a name it lists the systems."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        parser.add_argument("name", nargs="?", choices=NAMES, help="The system to run.")
        parser.add_argument(
            "--erase", action="store_true", help="Delete the tasks and the system's rows that are there before."
        )

    def handle(self, *args: Any, name: str | None, **options: Any) -> None:
        """List the systems, or run one."""
        if name is None:
            for each in NAMES:
                self.stdout.write(f"{each:10} {headline(each)}")
            return
        screen = Screen(sys.stdout, colour=not options["no_color"])
        fleet = Fleet({"HEARTBEAT_INTERVAL": "1"})
        harness = Harness(screen, fleet)
        began = time.monotonic()
        try:
            screen.say("Making the tables.")
            call_command("migrate", verbosity=0)
            prepare(name, erase=options["erase"])
            screen.say(f"{headline(name)}\n")
            importlib.import_module(f"example_project.systems.{name}.scenario").run_scenario(harness)
        except (TimeoutError, RuntimeError) as error:
            raise CommandError(str(error)) from error
        finally:
            fleet.stop()
        show(harness, time.monotonic() - began)
        if not harness.holds:
            raise CommandError("Some claim does not hold.")


def headline(name: str) -> str:
    """Return the first line of a system's docstring."""
    return (importlib.import_module(f"example_project.systems.{name}").__doc__ or "").partition("\n")[0]


def prepare(name: str, *, erase: bool) -> None:
    """Empty the tables of a system and of tasks. Raises ``CommandError`` if they have rows and ``erase`` is False."""
    models: list[Any] = [*apps.get_app_config(name).get_models(), Task]
    filled = [model for model in models if model.objects.exists()]
    if filled and not erase:
        tables = ", ".join(model._meta.db_table for model in filled)
        raise CommandError(
            f"The database of DATABASE_URL has rows in {tables}. Name another one, or add --erase to delete them all."
        )
    # The tasks come last: triggers may make tasks of what is deleted.
    for model in models if filled else ():
        model.objects.all().delete()


def show(harness: Harness, seconds: float) -> None:
    """Show the evidence."""
    screen = harness.screen
    screen.say("\nAsked of the database:")
    for finding in harness.findings:
        violations = "" if finding.holds else f"  ({counted(finding.violations, 'violation')})"
        screen.say(f"  {screen.mark(finding.holds)} {finding.claim}{violations}")
    screen.say(f"\nThe whole took {seconds:.1f} s.")
