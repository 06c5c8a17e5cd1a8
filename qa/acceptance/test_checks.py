"""``manage.py check`` runs the package's checks in a process that imports nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.acceptance

PROGRAM = """
import django
django.setup()
from django.core.checks import registry
print(sorted({check.__module__ for check in registry.registry.get_checks(True)}))
"""


def test_system_checks_are_registered_after_django_setup():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "example_project.settings"},
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "'django_pglock.checks'" in done.stdout, done.stdout + done.stderr
