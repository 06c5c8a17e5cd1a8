from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request

import pytest
from django.contrib.auth.models import User
from django.db import connection

from example_project.demo.processes import free_port
from tests.browser.chromium import Chromium
from tests.conftest import ROOT


@pytest.fixture
def browser():
    with Chromium() as found:
        yield found


@pytest.fixture
def shop():
    """The shop's server with a strict policy, and somebody already logged in."""
    User.objects.create_superuser("admin", password="admin")
    port = free_port()
    url = f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{connection.settings_dict['NAME']}"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "manage.py"), "serveshop", str(port)],
        env={
            **os.environ,
            "DATABASE_URL": url,
            "DJANGO_SETTINGS_MODULE": "tests.browser.settings",
            "PYTHONPATH": str(ROOT),
        },
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    for _ in range(1200):
        try:
            urllib.request.urlopen(f"{address}/admin/", timeout=60).close()
            break
        except OSError:
            time.sleep(0.05)
    yield address
    process.terminate()
    process.wait(60)
