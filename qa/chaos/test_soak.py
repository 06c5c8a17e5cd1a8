"""The soak starts and ends: one round of it, with the fault of one of several children."""

from __future__ import annotations

import subprocess
import sys
from itertools import count

from qa.soak.faults import kill_child
from qa.soak.rounds import in_random_order
from tests.conftest import NEVER, ROOT


def test_a_round_of_the_soak_keeps_every_guarantee():
    seed = next(number for number in count() if next(in_random_order(number)) is kill_child)
    # Too short for a second round.
    options = ("--hours", "0.005", "--every", "600", "--seed", str(seed))
    command = [sys.executable, "-m", "qa.soak", *options]
    soak = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=NEVER)
    assert soak.returncode == 0, soak.stdout + soak.stderr
    assert "| SIGKILL of a child | 1 |" in soak.stdout
    assert "Rounds in which a guarantee was broken: 0." in soak.stdout
