"""A primary and a synchronous standby change places under load; twenty times in a row by ``switch_over`` itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.acceptance


def test_a_switch_over_loses_no_committed_task():
    """Once in order, once by killing each process of the primary."""
    command = [sys.executable, "-m", "qa.servers.switch_over", "--switches", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
