"""Ctrl-C at every stage of the first run: one sentence, exit code 130, no traceback, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from uuid import uuid4

import pytest

from tests.conftest import BASE_PYTHON, NEVER, ROOT

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found by their environment in /proc"),
]

#: The demo with one worker, few clicks and few shoppers: each process that it starts is a new interpreter.
SMALL = """
import runpy, sys
from example_project.demo import size

size.WORKERS, size.CLICKS, size.SHOPPERS = 1, 5, 2
sys.argv = ["manage.py", "demo", "--no-serve"]
runpy.run_path("manage.py", run_name="__main__")
"""


class Run:
    """A command in a session of its own, as in a terminal. All that it starts inherits a mark in its environment."""

    def __init__(self, command, folder, environment):
        mark = uuid4().hex
        self.mark = f"RUN_OF_TEST={mark}"
        self.process = subprocess.Popen(
            command, cwd=folder, env={**environment, "RUN_OF_TEST": mark}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            # A shell that runs the tests in the background has them ignore Ctrl-C, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        self.output = ""
        self._watch = threading.Timer(NEVER, self.process.kill)
        self._watch.start()

    def wait_for(self, text):
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"{text!r} did not come:\n{self.output}")

    def interrupt(self):
        """Do as a terminal does at Ctrl-C: signal all processes of the foreground. Return the folder of its server."""
        folder = self.folder_of_server()
        os.killpg(self.process.pid, signal.SIGINT)
        self.output += self.process.stdout.read()
        self.process.wait(NEVER)
        self._watch.cancel()
        self.process.stdout.close()
        return folder

    def left_behind(self):
        """Return the processes that it has started and that still run."""
        return [words for words in self._processes() if words]

    def folder_of_server(self):
        guards = [words for words in self._processes() if any("postgres_guard" in word for word in words)]
        return Path(guards[0][-1]) if guards else None

    def _processes(self):
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark in (place / "environ").read_text(errors="replace").split("\0"):
                    found.append((place / "cmdline").read_text(errors="replace").rstrip("\0").split("\0"))
            except OSError:
                continue
        return found


@pytest.fixture
def run():
    made = []

    def start(*arguments):
        made.append(Run(*arguments))
        return made[-1]

    yield start
    for each in made:
        each._watch.cancel()
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def assert_stopped(run, eventually):
    assert run.process.returncode == 130, run.output
    assert "Traceback" not in run.output, run.output
    assert "Error" not in run.output, run.output
    assert run.output.splitlines()[-1] == "Stopped by Ctrl-C. Nothing that this command has started is left behind."
    eventually(lambda: not run.left_behind(), why=f"left behind: {run.left_behind()}")


@pytest.fixture
def bare(tmp_path):
    """A copy of what the first command needs."""
    for name in ("manage.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_ctrl_c_while_the_environment_is_made_leaves_nothing(run, bare, eventually):
    started = run([BASE_PYTHON, "manage.py", "demo"], bare, {"PATH": "/usr/bin:/bin", "HOME": str(bare)})
    started.wait_for("First run")
    eventually((bare / ".venv").exists)
    started.interrupt()
    assert_stopped(started, eventually)
    assert not (bare / ".venv").exists()


def own_environment():
    """Return the environment of the tests, in which everything is installed, without their database.

    Also without development mode: Ctrl-C may come while psycopg opens a connection, and psycopg would then warn that
    this connection is deleted while it is open.
    """
    others = ("DATABASE_URL", "DJANGO_SETTINGS_MODULE", "PYTHONDEVMODE")
    kept = {name: value for name, value in os.environ.items() if name not in others}
    return {**kept, "PGLOCK_NO_BOOTSTRAP": "1"}


@pytest.mark.parametrize(
    ("stage", "command"),
    [
        ("Starting a private PostgreSQL", ["manage.py", "demo"]),
        ("Making the tables", ["manage.py", "demo"]),
        ("The shop opens", ["-c", SMALL]),
        ("others buy", ["-c", SMALL]),
    ],
)
def test_ctrl_c_while_the_demo_runs_ends_its_processes(run, eventually, stage, command):
    started = run([sys.executable, *command], ROOT, own_environment())
    started.wait_for(stage)
    folder = started.interrupt()
    assert_stopped(started, eventually)
    assert folder is None or not folder.exists()
