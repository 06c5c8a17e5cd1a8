"""Processes that the tests fork from a warm parent are processes as any other: what other tests rely on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module

import pytest
from django.test import override_settings

import tests.settings
import tests.settings_slow_beats
from django_pglock.conf import get_settings
from example_project.demo.processes import _end_with_parent
from tests.conftest import ROOT, environment_at
from tests.warm import process as warm
from tests.warm.process import BareProcess, WarmProcess

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


def test_warm_processes_have_the_settings_of_their_environment_and_end_independently(started):
    (first, about_first), (second, about_second) = started(0), started(0, VALUE="2", DEBUG="yes")
    third, _ = started(0)
    assert [(about["value"], about["debug"]) for about in (about_first, about_second)] == [(None, False), ("2", True)]
    first.send_signal(signal.SIGKILL)
    assert first.wait(120) == -signal.SIGKILL
    assert (second.poll(), third.poll()) == (None, None)
    third.communicate("\n", timeout=120)
    assert third.returncode == 0


def test_a_warm_process_runs_a_module_with_its_own_application_name(started, tmp_path):
    _, about = started(0, PGAPPNAME="first")
    parents = list(warm._parents)
    _, about_module = started(0, "-m", "program", PGAPPNAME="second")
    assert about_module["arguments"] == [str(tmp_path / "program.py"), "0"]
    assert (about_module["name"], about_module["path"]) == ("__main__", str(tmp_path))
    assert [each["application"] for each in (about, about_module)] == ["first", "second"]
    assert list(warm._parents) == parents, "they have one parent"


def test_a_child_has_the_databases_and_limits_of_its_own_environment(started, tmp_path):
    """As a new interpreter has, although the parent has read those of the first. Each setting is of another module."""
    module = "tests.chaos.settings"
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


def test_processes_with_similar_settings_have_one_parent_and_their_own_settings(started):
    _, ours = started(0)
    parents = list(warm._parents)
    _, other = started(0, DJANGO_SETTINGS_MODULE="tests.settings_slow_beats")
    _, again = started(0)
    assert list(warm._parents) == parents
    assert ours["settings"] == again["settings"] == repr(get_settings())
    with override_settings(DJANGO_PGLOCK=tests.settings_slow_beats.DJANGO_PGLOCK):
        assert other["settings"] == repr(get_settings())


@pytest.mark.parametrize("name", warm.SIMILAR)
def test_similar_settings_differ_only_in_settings_that_are_read_again(name):
    def values(module):
        kept = {key: value for key, value in vars(module).items() if key.isupper()}
        return {key: value for key, value in kept.items() if key not in warm.SETTINGS_READ_AGAIN}

    assert values(import_module(name)) == values(tests.settings)


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


def test_a_warm_process_with_a_closed_output_ends_as_a_new_interpreter():
    environment = environment_at(os.environ["DATABASE_URL"])

    def exit_code(start):
        read, write = os.pipe()
        os.close(read)
        process = start([sys.executable, "-c", "print('unread')"], env=environment, stdout=write, stderr=write)
        os.close(write)
        return process.wait(120)

    assert exit_code(WarmProcess) == exit_code(subprocess.Popen) != 0


def test_a_warm_process_of_another_project_imports_only_that_project(tmp_path):
    """Its parent has imported neither its settings nor ours, and has set up no app."""
    (tmp_path / "settings.py").write_text("SECRET_KEY = 'of the other project'")
    code = """
import os, sys
from django.apps import apps
from django.conf import settings
assert not settings.configured and not apps.ready
assert not [name for name in sys.modules if name.startswith(("tests.settings", "example_project"))]
print(settings.SECRET_KEY, os.environ["VALUE"], "DATABASE_URL" in os.environ, sys.path[0])
"""
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    environment |= {"DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "VALUE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with BareProcess([sys.executable, "-c", code], env=environment, cwd=tmp_path, **pipes) as process:
        assert process.communicate(timeout=120)[0] == f"of the other project 1 False {tmp_path}\n"
    (tmp_path / "settings.py").write_text("SECRET_KEY = 'changed since'")
    with BareProcess([sys.executable, "-c", code], env=environment, cwd=tmp_path, **pipes) as process:
        assert process.communicate(timeout=120)[0].startswith("changed since")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel sends this signal on Linux only")
@pytest.mark.parametrize("with_children", [True, False])
def test_a_warm_process_ends_with_the_parent_of_its_tests(tmp_path, monkeypatch, with_children):
    """A warm process continues if its parent is only replaced by another one."""
    monkeypatch.setattr(warm, "_parents", {})
    child = BareProcess(
        [sys.executable, "-c", "print('begun', flush=True); print('read', input(), flush=True)"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, preexec_fn=_end_with_parent,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout.readline() == "begun\n"
    [parent] = warm._parents.values()
    parent.close(with_children=with_children)
    assert with_children or child.stdout.read() == "", "it continues"
    child.stdin.write("a line\n")
    with suppress(BrokenPipeError):
        child.stdin.flush()
    assert child.stdout.read() == ("read a line\n" if with_children else "")
    parent._process.wait(120)
    child._told.close()
    child.returncode = 0
    child.stdout.close()
    with suppress(BrokenPipeError):
        child.stdin.close()
