"""``manage.py`` as users call it, on the database of the tests."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT, environment_at
from tests.warm.process import start


def manage(*arguments, **environment):
    """Start the command and return its process."""
    return _start(str(ROOT / "manage.py"), *arguments, **environment)


def django(*arguments, **environment):
    """Do the same without the ``manage.py`` of this project, which does more than that of a project of users."""
    return _start("-m", "django", *arguments, **environment)


def locktasks(*arguments):
    """Run the command to its end. Return its exit code, output and errors."""
    process = manage("locktasks", *map(str, arguments))
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def _start(*arguments, **environment):
    return start(
        [sys.executable, *arguments],
        env=environment_at(**environment),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
