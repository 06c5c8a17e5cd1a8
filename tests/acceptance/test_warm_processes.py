"""Processes that the tests fork from a warm parent are processes as any other: what other tests rely on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.warm.process import WarmProcess

# Tells about itself, reads a line, and ends with the exit code that is its second argument.
PROGRAM = """
import json, os, signal, sys, threading
from django.db import connection
from django.conf import settings
about = {
    "pid": os.getpid(), "arguments": sys.argv, "name": __name__, "folder": os.getcwd(), "path": sys.path[0],
    "is_alone": os.getpgrp() == os.getpid(), "value": os.environ["VALUE"], "debug": settings.DEBUG,
    "threads": threading.active_count(), "connection": repr(connection.connection),
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
    "handlers": [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
}
print(json.dumps(about), flush=True)
print("to stderr", file=sys.stderr)
print("read", sys.stdin.readline().strip())
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    processes = []

    def start(code, **environment):
        process = WarmProcess(
            [sys.executable, str(program), str(code)],
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "VALUE": "1", **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        processes.append(process)
        return process, json.loads(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_it_is_like_a_new_interpreter(started, tmp_path):
    process, about = started(7)
    assert process.poll() is None
    assert (about["pid"], about["is_alone"]) == (process.pid, True)
    assert (about["arguments"], about["name"]) == ([str(tmp_path / "program.py"), "7"], "__main__")
    assert (about["folder"], about["path"]) == (str(tmp_path), str(tmp_path))
    assert (about["threads"], about["connection"]) == (1, "None")
    # The fourth is the one that lists them.
    assert about["descriptors"] == [0, 1, 2, 3]
    interrupt = signal.getsignal(signal.SIGINT)
    expected = signal.SIG_IGN if interrupt == signal.SIG_IGN else signal.default_int_handler
    assert about["handlers"] == [repr(expected), repr(signal.SIG_DFL), repr(signal.SIG_DFL)]
    assert process.communicate("a line\n", timeout=120) == ("read a line\n", "to stderr\n")
    assert process.returncode == 7


def test_each_environment_has_its_own_settings_and_each_process_its_own_end(started):
    (first, about_first), (second, about_second) = started(0), started(0, VALUE="2", DEBUG="yes")
    third, _ = started(0)
    assert [(about["value"], about["debug"]) for about in (about_first, about_second)] == [("1", False), ("2", True)]
    first.send_signal(signal.SIGKILL)
    assert first.wait(120) == -signal.SIGKILL
    assert (second.poll(), third.poll()) == (None, None)
    third.communicate("\n", timeout=120)
    assert third.returncode == 0
