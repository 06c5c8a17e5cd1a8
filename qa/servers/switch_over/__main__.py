"""``python -m qa.servers.switch_over --switches 20``: two servers change places under load, and nothing is lost.

Every other switch is in order; before all others, each process of the primary is killed. The old primary then comes
back as a synchronous standby, and the next switch goes the other way. Two workers and two clients keep running: their
``DATABASES`` lists both servers. The exit code is 0 if every guarantee was kept.
"""

from __future__ import annotations

import argparse
import os
import sys

import django
from django.core.management import call_command

from qa.servers.switch_over.pair import Pair


def main() -> int:
    """Switch over, and print what happened."""
    parser = argparse.ArgumentParser(prog="python -m qa.servers.switch_over", description=__doc__)
    parser.add_argument("--switches", type=int, default=20, help="how many in a row (default: 20)")
    options = parser.parse_args()
    with Pair() as pair:
        os.environ.update(
            DJANGO_SETTINGS_MODULE="qa.servers.switch_over.settings",
            SWITCH_OVER_HOSTS=pair.hosts,
            DATABASE_URL=pair.primary.url,
        )
        django.setup()
        call_command("migrate", "django_pglock", verbosity=0)
        call_command("migrate", "sample", run_syncdb=True, verbosity=0)
        from qa.servers.switch_over.rounds import Rounds  # models can be imported now

        with Rounds(pair) as rounds:
            for number in range(1, options.switches + 1):
                print(rounds.switch(number, power_off=number % 2 == 0), flush=True)
            findings = rounds.findings()
            print(rounds.summary())
    print("\n".join(findings) or "Every guarantee was kept.")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
