"""``python -m qa.soak --hours 8``: mixed load, a fault every minute, and a report.

It prints a line of JSON for each round and, at the end, the report in Markdown. SIGINT ends the soak after the current
round. The exit code is 1 if a guarantee was broken.
"""

from __future__ import annotations

import argparse
import os
import sys

import django
from django.core.management import call_command

from example_project.postgres import PrivatePostgres
from qa.soak.report import Round, report


def main() -> int:
    """Run a soak, and print its report."""
    parser = argparse.ArgumentParser(prog="python -m qa.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=8.0, help="how long (default: 8)")
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="time between two faults")
    parser.add_argument("--seed", type=int, default=1, help="of the order of faults, and of the load")
    options = parser.parse_args()
    rounds = soak(options.hours * 3600, options.every, options.seed)
    print("\n".join(report(rounds)))
    return 1 if any(each["findings"] for each in rounds) else 0


def soak(seconds: float, every: float, seed: int) -> list[Round]:
    """Start a server, set Django up on it, and soak."""
    with PrivatePostgres(durable=True, settings={"max_connections": "80"}) as server:
        os.environ.update(DATABASE_URL=server.url, DJANGO_SETTINGS_MODULE="qa.chaos.settings")
        django.setup()
        call_command("migrate", run_syncdb=True, verbosity=0)
        from qa.soak.deployment import LIMIT
        from qa.soak.rounds import Rounds
        from tests import conftest  # models can be imported now

        conftest.NEVER = LIMIT
        return Rounds(server, seed).run(seconds, every)


if __name__ == "__main__":
    sys.exit(main())
