"""``locktasks`` as a script calls it: nobody to ask, and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from django.db import connection

from django_pglock.models import Task
from tests.conftest import ROOT
from tests.db.store.test_prune import make

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def locktasks(*arguments):
    url = f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{connection.settings_dict['NAME']}"
    return subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "locktasks", *map(str, arguments)],
        env={**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_exit_codes_and_streams():
    row = make("FAILED", days=0)
    shown = locktasks("status", "--json", "--settings", "tests.settings")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert json.loads(shown.stdout)["queues"][0]["failed"] == 1

    refused = locktasks("retry", "--all")
    assert refused.returncode == 1
    assert refused.stdout.startswith("1 task would run again.")
    assert "give --yes" in refused.stderr
    assert "Traceback" not in refused.stderr

    done = locktasks("retry", row.pk)
    assert (done.returncode, done.stdout) == (0, "1 task will run again.\n")
    assert Task.objects.get().status == "READY"
