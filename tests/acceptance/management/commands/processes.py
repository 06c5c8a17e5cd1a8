"""``manage.py`` as users call it, on the database of the tests."""

from __future__ import annotations

import os
import subprocess
import sys

from django.db import connection

from tests.conftest import ROOT
from tests.warm.process import start


def manage(*arguments, **environment):
    """Start the command and return its process."""
    url = f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{connection.settings_dict['NAME']}"
    return start(
        [sys.executable, str(ROOT / "manage.py"), *arguments],
        env={
            **os.environ,
            "DATABASE_URL": url,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": str(ROOT),
            **environment,
        },
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
