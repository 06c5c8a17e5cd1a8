"""A worker in a process of its own, which has imported no more than Django does when it starts."""

from __future__ import annotations

import subprocess
import sys


def drain_elsewhere() -> str:
    """Run every task that is due in such a worker, until none is left; return what it has printed.

    The tests' own process has imported the packages' modules, so a worker in it knows functions that others do not.
    """
    # The projects here have no more settings than their tests need.
    command = [sys.executable, "-m", "django", "runlockworker", "--drain", "--skip-checks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
