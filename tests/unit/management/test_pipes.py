"""A command whose output is not read to its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from django_pglock.management.pipes import ignore_broken_pipe

@ignore_broken_pipe()
def show():
    for number in range(lines):
        print("a line of a table", number)

show()
"""


@pytest.mark.parametrize("lines", [10, 100_000], ids=["less than a pipe holds", "more than a pipe holds"])
def test_a_reader_that_ends_early_causes_no_error(lines):
    """``locktasks list | head`` printed a traceback, and so did Python at its end."""
    program = f"lines = {lines}\nimport sys\nsys.stdin.read()\n{PROGRAM}"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate("")
    assert (process.returncode, errors) == (0, "")
