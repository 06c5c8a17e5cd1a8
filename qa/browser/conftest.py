from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from django.contrib.auth.models import User

from example_project.demo.processes import free_port
from qa.browser.chromium import Chromium
from tests.conftest import ROOT, environment_at
from tests.warm.process import start


@pytest.fixture(scope="session")
def chromium():
    """One browser for all tests: to start it takes a second of CPU time."""
    with Chromium() as found:
        yield found


@pytest.fixture
def browser(chromium):
    """The browser with a new profile."""
    chromium.begin_anew()
    return chromium


@pytest.fixture(scope="session")
def server(django_db_setup):
    """The address of the shop's server with a strict policy, on which a user is logged in."""
    port = free_port()
    process = start(
        [sys.executable, str(ROOT / "manage.py"), "serveshop", str(port)],
        env=environment_at(DJANGO_SETTINGS_MODULE="qa.browser.settings"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    for _ in range(1200):
        try:
            urllib.request.urlopen(f"{address}/healthz/", timeout=60).close()
            break
        except urllib.error.HTTPError as answer:
            # Without a worker the shop is not healthy, but it serves.
            answer.close()
            break
        except OSError:
            time.sleep(0.05)
    else:
        pytest.fail("the shop's server does not answer")
    yield address
    process.terminate()
    process.wait(60)


@pytest.fixture
def shop(server, transactional_db):
    """The server, with its administrator."""
    User.objects.create_superuser("admin", password="admin")
    return server
