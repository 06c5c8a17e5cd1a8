"""``python -m qa.soak --hours 8``: mixed load, a fault every minute, and a report.

The folder gets ``samples.jsonl``, ``rounds.jsonl`` and, at the end, ``report.md``. ``--report`` makes the report of
a folder, also while the soak runs. SIGINT ends the soak after the current round. The exit code is 1 if a guarantee was
broken.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import django
from django.core.management import call_command

from example_project.postgres import PrivatePostgres
from qa.soak.report import write_report


def main() -> int:
    """Run a soak, or make a report."""
    parser = argparse.ArgumentParser(prog="python -m qa.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=8.0, help="how long (default: 8)")
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="time between two faults")
    parser.add_argument("--seed", type=int, default=1, help="of the order of faults, and of the load")
    parser.add_argument("--folder", type=Path, help="for samples and report (default: a new temporary one)")
    parser.add_argument("--report", action="store_true", help="only make the report of the folder")
    parser.add_argument("--docs", action="store_true", help="with --report: write it into docs/reliability.md")
    options = parser.parse_args()
    folder: Path = options.folder or Path(tempfile.mkdtemp(prefix="pglock-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not options.report:
        soak(folder, options.hours * 3600, options.every, options.seed)
    is_kept = write_report(folder, in_docs=options.docs)
    print(f"The report is {'docs/reliability.md' if options.docs else folder / 'report.md'}.")
    return 0 if is_kept else 1


def soak(folder: Path, seconds: float, every: float, seed: int) -> None:
    """Start a server, set Django up on it, and soak."""
    with PrivatePostgres(durable=True, settings={"max_connections": "80"}) as server:
        os.environ.update(DATABASE_URL=server.url, DJANGO_SETTINGS_MODULE="qa.chaos.settings")
        django.setup()
        call_command("migrate", run_syncdb=True, verbosity=0)
        from qa.soak.deployment import LIMIT
        from qa.soak.rounds import Rounds
        from tests import conftest  # models can be imported now

        conftest.NEVER = LIMIT
        Rounds(server, folder, seed).run(seconds, every)


if __name__ == "__main__":
    sys.exit(main())
