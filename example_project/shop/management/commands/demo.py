"""``manage.py demo``: run the demo and show what it proves."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from django.contrib.auth.hashers import make_password
from django.contrib.auth.models import User
from django.core.management import BaseCommand, CommandError, CommandParser, call_command

from example_project.demo import evidence, size
from example_project.demo.durable import Durable
from example_project.demo.durable import Report as DurableReport
from example_project.demo.durable import show as show_durable
from example_project.demo.processes import Fleet
from example_project.demo.scenario import Report, Scenario
from example_project.demo.screen import Screen, counted
from example_project.shop.models import CreditEntry

LOGIN = "demo"


class Command(BaseCommand):
    """Plays the demo and shows the evidence."""

    help = (
        "Show the main job on real input: a shop with impatient customers, 2,000 tasks and four workers, one of which "
        "is killed in the middle; then ask the database what became of it. Ends with 1 if any claim does not hold. "
        "Uses a private PostgreSQL unless DATABASE_URL is set; that database must have no tasks and no orders yet."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        parser.add_argument("--no-serve", action="store_true", help="End after the evidence instead of serving.")
        parser.add_argument(
            "--erase", action="store_true", help="Delete the tasks and orders that are in the database before."
        )
        parser.add_argument(
            "--durable",
            action="store_true",
            help="Show instead one task of six steps, whose worker is killed six times: between steps and within them.",
        )
        parser.add_argument("--json", action="store_true", help="Print the figures as JSON and end.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Prepare, run the scenario, show its report, serve."""
        screen = Screen(sys.stdout, quiet=options["json"], colour=not options["no_color"])
        fleet = Fleet({"HEARTBEAT_INTERVAL": "1"})
        try:
            screen.say("Making the tables.")
            call_command("migrate", verbosity=0)
            prepare(erase=options["erase"])
            scenario = Durable(screen, fleet) if options["durable"] else Scenario(screen, fleet)
            report = scenario.run()
            if options["json"]:
                self.stdout.write(json.dumps(report.as_dict(), indent=2))
            (show_durable if isinstance(report, DurableReport) else show)(screen, report)
            show_findings(screen, report)
            if isinstance(scenario, Scenario) and report.holds and not (options["no_serve"] or options["json"]):
                serve(screen, scenario)
        except (TimeoutError, RuntimeError) as error:
            raise CommandError(str(error)) from error
        finally:
            fleet.stop()
        if not report.holds:
            raise CommandError("Some claim does not hold.")


def prepare(*, erase: bool) -> None:
    """Empty the tables. Raises ``CommandError`` if they have rows and ``erase`` is False."""
    if not (erase or evidence.is_empty()):
        raise CommandError(
            "The database of DATABASE_URL has tasks or orders. Name another one, or add --erase to delete them all."
        )
    evidence.reset()


def show(screen: Screen, report: Report) -> None:
    """Show the figures."""
    answers = ", ".join(f"{count} x {status}" for status, count in report.http_answers.items())
    screen.say(
        f"\n{counted(report.tasks, 'task')} at {report.tasks_per_second:,.0f}/s; "
        f"started after p50 {report.latency_p50_ms:.0f} ms, p95 {report.latency_p95_ms:.0f} ms.\n"
        f"{counted(report.taken_over, 'task')} of the killed worker went to others after {report.takeover_seconds} s.\n"
        f"{counted(report.charges, 'charge')}; HTTP answers: {answers}.\n\nAsked of the database:"
    )


def show_findings(screen: Screen, report: Report | DurableReport) -> None:
    """Show the evidence as a table."""
    for finding in report.findings:
        violations = "" if finding.holds else f"  ({counted(finding.violations, 'violation')})"
        screen.say(f"  {screen.mark(finding.holds)} {finding.claim}{violations}")
    screen.say(f"\nThe whole took {report.seconds} s.")


def serve(screen: Screen, scenario: Scenario) -> None:
    """Let a person look around until Ctrl-C."""
    who = make_visitor()
    scenario.slow_down_the_bank()
    shop = f"http://127.0.0.1:{scenario.port}"
    screen.say(
        f"\nNow it is your turn. The shop and {counted(size.WORKERS - 1, 'worker')} still run; log in as {who}.\n"
        f"  {shop}/  press Buy twice: the bank takes two seconds\n"
        f"  {shop}/admin/django_pglock/overview/  what ran, what failed, who works\n"
        f"  {shop}/admin/django_pglock/task/?status=FAILED  tasks, with their attempts, and what you can do with them\n"
        f"  {shop}/admin/django_pglock/advisorylock/  who holds a lock, and who waits for it\n"
        "Ctrl-C ends all of it, the database included."
    )
    while True:
        time.sleep(1)


def make_visitor() -> str:
    """Make the user of the person who looks around, with credits. Return the name and the password."""
    visitor, is_new = User.objects.get_or_create(
        username=LOGIN, defaults={"is_staff": True, "is_superuser": True, "password": make_password(LOGIN)}
    )
    CreditEntry.objects.create(user=visitor, amount=1_000, reason="gift")
    return f"{LOGIN}, password {LOGIN}" if is_new else f"{LOGIN}, with the password of this database"
