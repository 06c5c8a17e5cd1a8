"""The pytest plugin, in a project of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from django.db import connection

from tests.conftest import database_url, environment_at

SETTINGS = """
import environ

SECRET_KEY = "only-for-this-test"
USE_TZ = True
DATABASES = {"default": environ.Env().db()}
INSTALLED_APPS = ["django_pglock"]
"""
TESTS = """
import pytest
from django_pglock import LockNotAvailable, lock

def test_held(hold_lock, db):
    hold_lock("order", 5)
    with pytest.raises(LockNotAvailable), lock("order:5", timeout=0):
        pass
"""


@pytest.mark.django_db(transaction=True)
def test_the_pytest_plugin_holds_locks(tmp_path):
    environment = environment_at(
        database_url(f"{connection.settings_dict['NAME']}_plugin"),
        PYTHONPATH=str(tmp_path),
        DJANGO_SETTINGS_MODULE="settings",
        PGLOCK_NO_BOOTSTRAP="1",
        # Other plugins that are installed here have no part in it, and take as long to import as Django.
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    (tmp_path / "test_project.py").write_text(TESTS)
    (tmp_path / "settings.py").write_text(SETTINGS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_django.plugin", "-p", "django_pglock.pytest_plugin"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert "1 passed" in ran.stdout.splitlines()[-1], ran.stdout + ran.stderr
