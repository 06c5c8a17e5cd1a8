"""Where gevent has replaced threads by greenlets: locks work, and leases say what they need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
from gevent import monkey; monkey.patch_all()
import gevent, django, environ
from django.conf import settings
from django.core.management import call_command
settings.configure(DATABASES={"default": environ.Env().db()}, INSTALLED_APPS=["django_pglock"])
django.setup()
call_command("migrate", verbosity=0)
from django.db import connection
from django_pglock import Lease, leader, lock
from django_pglock.errors import ConfigurationError
held = []
def work():
    for _ in range(20):
        with lock("one", timeout=60):
            held.append(1)
            assert len(held) == 1
            gevent.sleep(0.001)
            held.pop()
    connection.close()
gevent.joinall([gevent.spawn(work) for _ in range(3)], raise_error=True)
for take in (Lease("a", ttl=5), leader("b")):
    try:
        take.acquire()
    except ConfigurationError as error:
        assert "gevent" in str(error)
    else:
        raise AssertionError
print("fine")
"""


def test_locks_work_and_leases_say_what_they_need(direct):
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **direct.environment, "PYTHONPATH": str(root)}, cwd=root,
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stdout + done.stderr
