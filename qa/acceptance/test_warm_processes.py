"""Processes that the tests fork from a warm parent are processes as any other: what other tests rely on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT, environment_at
from tests.warm import process as warm
from tests.warm.process import WarmProcess

# Prints its state, reads a line, and ends with the exit code in its second argument.
PROGRAM = """
import json, os, signal, sys, threading
from django.db import connection
from django.conf import settings
from django_pglock.conf import get_settings
about = {
    "pid": os.getpid(), "arguments": sys.argv, "name": __name__, "folder": os.getcwd(), "path": sys.path[0],
    "is_alone": os.getpgrp() == os.getpid(), "value": os.environ.get("VALUE"), "debug": settings.DEBUG,
    "threads": threading.active_count(), "connection": repr(connection.connection),
    "application": os.environ.get("PGAPPNAME"), "database": connection.settings_dict["NAME"],
    "url": settings.PAYMENTS_URL, "settings": repr(get_settings()),
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

    def start(code, *how, preexec_fn=None, **environment):
        process = WarmProcess(
            [sys.executable, *(how or [str(program)]), str(code)], preexec_fn=preexec_fn,
            env=environment_at(os.environ["DATABASE_URL"], **environment),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        processes.append(process)
        return process, json.loads(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_warm_process_has_the_state_of_a_new_interpreter(started, tmp_path):
    process, about = started(7)
    assert process.poll() is None
    assert (about["pid"], about["is_alone"]) == (process.pid, True)
    assert (about["arguments"], about["name"]) == ([str(tmp_path / "program.py"), "7"], "__main__")
    assert (about["folder"], about["path"]) == (str(tmp_path), str(tmp_path))
    assert (about["threads"], about["connection"]) == (1, "None")
    # The fourth descriptor is that of the folder which lists them.
    assert about["descriptors"] == [0, 1, 2, 3]
    interrupt = signal.getsignal(signal.SIGINT)
    expected = signal.SIG_IGN if interrupt == signal.SIG_IGN else signal.default_int_handler
    assert about["handlers"] == [repr(expected), repr(signal.SIG_DFL), repr(signal.SIG_DFL)]
    assert process.communicate("a line\n", timeout=120) == ("read a line\n", "to stderr\n")
    assert process.returncode == 7


def test_a_child_has_the_databases_and_limits_of_its_own_environment(started, tmp_path):
    """As a new interpreter has, although the parent has read those of the first. Each setting is of another module."""
    module = "qa.chaos.settings"
    others = {
        "DATABASE_URL": f"{os.environ['DATABASE_URL']}_other", "PAYMENTS_URL": "http://127.0.0.1:1",
        "DEBUG": "yes", "HEARTBEAT_INTERVAL": "2", "CHAOS_PGLOCK": '{"HEARTBEAT_INTERVAL": 2.1, "POLL_INTERVAL": 9}',
    }  # fmt: skip
    _, before = started(0, DJANGO_SETTINGS_MODULE=module)
    parents = list(warm._parents)
    _, about = started(0, DJANGO_SETTINGS_MODULE=module, **others)
    _, again = started(0, DJANGO_SETTINGS_MODULE=module)
    assert list(warm._parents) == parents, "they have one parent"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DJANGO_SETTINGS_MODULE": module, **others}
    new = subprocess.run(
        [sys.executable, "-c", f"import django; django.setup()\n{PROGRAM}", "0"],
        env=environment, input="", capture_output=True, text=True, check=True,
    )  # fmt: skip
    expected = json.loads(new.stdout.splitlines()[0])
    names = ("database", "debug", "url", "settings")
    assert [about[name] for name in names] == [expected[name] for name in names]
    assert about["database"] == f"{before['database']}_other"
    assert [before[name] for name in names] == [again[name] for name in names]


#: Ends by ``sys.exit`` while a thread works, and with a function to call at its exit and a stream to flush.
ENDS = """
import atexit, sys, threading, time
def work():
    time.sleep(0.2)
    print("thread", flush=True)
threading.Thread(target=work).start()
atexit.register(lambda: print("exit", end=""))
sys.exit({code})
"""


@pytest.mark.parametrize(("code", "expected"), [("None", 0), ("3", 3), ("'a sentence'", 1)])
def test_a_warm_process_waits_for_threads_and_calls_atexit_functions(code, expected):
    environment = environment_at(os.environ["DATABASE_URL"])
    with WarmProcess(
        [sys.executable, "-c", ENDS.format(code=code)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        said = process.communicate(timeout=120)
    assert said == (b"thread\nexit", b"a sentence\n" if expected == 1 else b"")
    assert process.returncode == expected
