"""A child that a task has forked ends, whatever the function has raised."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import NEVER
from tests.warm.process import start

PROGRAM = """
import sys
from django_pglock.worker.running.task_thread import end_process

class Hostile(Exception):
    def __str__(self):
        raise ValueError

try:
    {raised}
except BaseException as error:
    end_process(error)
"""


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        ("pass; end_process(None)", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit('over')", 1, "SystemExit: over"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("raise Hostile", 1, "Hostile: <exception str() failed>"),
        ("sys.stderr.close(); raise Hostile", 1, ""),
    ],
)
def test_the_exit_code_is_the_one_of_python(raised, code, said):
    command = [sys.executable, "-c", PROGRAM.format(raised=raised)]
    with start(command, env=os.environ, stderr=subprocess.PIPE, text=True) as process:
        _, stderr = process.communicate(timeout=NEVER)
    last = "".join(stderr.splitlines()[-1:])
    assert (process.returncode, last.removeprefix("__main__.")) == (code, said)
