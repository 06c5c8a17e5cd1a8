"""The starter: children start, are signalled, their ends are told, and they die with their parent."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from django_pglock.worker.parent import starter as module
from django_pglock.worker.parent.starter import may_fork
from tests.conftest import NEVER, ROOT
from tests.unit.worker.parent import starting

KINDS = ("fork", "spawn")


class Running:
    """The program of ``starting.py``."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, starting.__file__, kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        _, self.pid, self.starter = self.hear("begun")

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def tell(self, *words: object) -> None:
        self.process.stdin.write(f"{' '.join(map(str, words))}\n")
        self.process.stdin.flush()

    def hear(self, *start: object) -> list[str]:
        """Wait for a line that begins so, and return its words."""
        words, deadline = [str(each) for each in start], time.monotonic() + NEVER
        while time.monotonic() < deadline:
            for line in self.lines:
                if line.split()[: len(words)] == words:
                    self.lines.remove(line)
                    return line.split(maxsplit=2)
            time.sleep(0.005)
        raise AssertionError(f"{words} did not come: {self.lines}")

    def start_child(self) -> tuple[str, list[Any]]:
        """Start a child; return its key, and what it has said of itself: its process, its parent's, its files."""
        self.tell("start")
        key = self.hear("started")[1]
        return key, ast.literal_eval(self.hear("heard", key)[2])["ready"]

    def end(self) -> None:
        if self.process.poll() is None:
            self.tell("end")
        assert self.process.wait(NEVER) is not None
        self.reader.join(NEVER)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


@pytest.fixture
def run():
    running: list[Running] = []

    def start(kind: str) -> Running:
        running.append(Running(kind))
        return running[-1]

    yield start
    for each in running:
        each.end()


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, also if it is not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + NEVER
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc")


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_of_children_are_told_with_their_exit_codes(run, kind):
    running = run(kind)
    (first, _), (second, _), (third, _) = [running.start_child() for _ in range(3)]
    running.tell("exit", first, 75)
    running.tell("raise", second)
    running.tell("kill", third)
    assert running.hear("ended", first)[2] == "75"
    assert running.hear("ended", second)[2] == "1"
    assert running.hear("ended", third)[2] == "-9"
    running.tell("kill", third)
    running.tell("end")
    assert running.process.wait(NEVER) == 0
    assert "RuntimeError: an error of a child" in running.process.stderr.read()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_printed_is_written_once(run, kind):
    running = run(kind)
    child, _ = running.start_child()
    running.tell("exit", child, 0)
    running.hear("ended", child)
    running.tell("end")
    running.process.wait(NEVER)
    running.reader.join(NEVER)
    assert running.lines.count("printed by the parent") == 1
    assert running.lines.count("printed by the child") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_has_no_file_of_its_parent_and_leaves_none_to_its_programs(run, kind):
    """With the end of a brother's channel it would keep that channel open, and the parent would not see its end."""
    running = run(kind)
    [*_, (_, first)] = [running.start_child() for _ in range(3)]
    [*_, (_, later)] = [running.start_child() for _ in range(3)]
    assert len(first[2]) == len(later[2])
    assert first[3] is False


def test_signals_of_the_process_group_end_neither_the_starter_nor_its_children(run):
    """Ctrl-C on a terminal, and systemd, reach all processes. The parent ends its children in order."""
    running = run("fork")
    child, _ = running.start_child()
    for number in starting.SIGNALS:
        os.kill(int(running.starter), number)
    other, (_, starter, *_) = running.start_child()
    assert str(starter) == running.starter
    running.tell("exit", other, 3)
    assert running.hear("ended", other)[2] == "3"
    running.tell("exit", child, 4)
    assert running.hear("ended", child)[2] == "4"


@needs_proc
def test_without_the_starter_the_children_are_gone_and_the_parent_knows(run):
    running = run("fork")
    (child, (first, *_)), (_, (second, *_)) = [running.start_child() for _ in range(2)]
    # As if the parent asked for something at this moment.
    os.kill(int(running.starter), signal.SIGSTOP)
    running.tell("start")
    running.tell("kill", child)
    os.kill(int(running.starter), signal.SIGKILL)
    running.hear("lost")
    wait_for(lambda: is_gone(first) and is_gone(second))


def test_a_starter_that_is_stopped_is_continued(run):
    running = run("fork")
    child, (pid, *_) = running.start_child()
    os.kill(int(running.starter), signal.SIGSTOP)
    running.start_child()
    os.kill(int(running.starter), signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    assert running.hear("ended", child)[2] == "-9"


@needs_proc
@pytest.mark.parametrize("kind", KINDS)
def test_children_die_with_their_parent_also_while_c_code_holds_the_gil(run, kind):
    running = run(kind)
    (_, (idle, *_)), (hog, (pid, *_)) = running.start_child(), running.start_child()
    running.tell("hog", hog)
    running.hear("heard", hog)
    os.kill(int(running.pid), signal.SIGKILL)
    wait_for(lambda: is_gone(idle) and is_gone(pid))


@needs_proc
def test_a_child_that_closes_all_its_files_is_seen_and_can_be_killed(run):
    running = run("fork")
    child, _ = running.start_child()
    running.tell("close", child)
    running.hear("over", child)
    running.tell("kill", child)
    assert running.hear("ended", child)[2] == "-9"


@pytest.mark.parametrize(
    ("platform", "method", "may"),
    [("linux", None, True), ("linux", "fork", True), ("linux", "spawn", False), ("darwin", None, False)],
)
def test_a_fork_is_used_where_it_is_safe(monkeypatch, platform, method, may):
    monkeypatch.setattr(module.sys, "platform", platform)
    monkeypatch.setattr(module.multiprocessing, "get_start_method", lambda allow_none: method)
    assert may_fork() is may


def test_a_system_without_unix_sockets_is_refused(monkeypatch):
    monkeypatch.delattr(module.socket, "AF_UNIX")
    with pytest.raises(module.ConfigurationError, match="Unix sockets"):
        module.refuse_platform()
