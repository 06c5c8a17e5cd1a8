"""The heartbeat process itself, without the worker for which it beats."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from django_pglock.models import Worker
from django_pglock.worker.liveness import heartbeat_process, heartbeat_process_main
from qa.acceptance.heartbeat_processes import is_there, sessions_of_helpers
from tests.conftest import NEVER

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


FORKS = """
import os, socket, time
from django_pglock.worker.liveness import heartbeat_process
mine, its_end = socket.socketpair()
helper = heartbeat_process.start(its_end)
its_end.close()
mine.send(heartbeat_process.line_of({"interval": 0.2, "limit": 1.0}) + b"\\n")
child = os.fork()
if child:
    print(helper.pid, child, flush=True)
time.sleep(60)
"""


def test_the_heartbeat_process_ends_while_a_forked_child_keeps_its_socket_open(eventually):
    parent = subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True)
    helper, child = map(int, parent.stdout.readline().split())
    try:
        parent.kill()
        parent.wait()
        eventually(lambda: not is_there(helper), why="the heartbeat process outlives its worker")
        assert is_there(child)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


class Charge:
    """A heartbeat process of this very process, and what a worker would send to it."""

    def __init__(self, **instructions):
        self.socket, its_end = socket.socketpair()
        with its_end:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(heartbeat_process.SCRIPT)],
                stdin=its_end,
                stderr=subprocess.PIPE,
                text=True,
            )
        self.instruct(**instructions)

    def instruct(self, **instructions):
        self.socket.send(heartbeat_process.line_of(instructions))

    def say(self):
        self.socket.send(b"\n")

    def end(self):
        self.socket.close()
        self.process.wait(NEVER)
        self.process.stderr.close()


@pytest.fixture
def charge(worker):
    """Start a heartbeat process for the row of a worker that does not exist, so no other process beats for it."""
    started = []

    def start(interval=0.1):
        running = worker()
        instructions = {**running.heartbeat.process._newest, "interval": interval}
        row = Worker.objects.get()
        running.shutdown()
        row.save(force_insert=True)
        started.append(Charge(**instructions))
        return started[-1], row

    yield start
    for each in started:
        each.end()


def beat(row):
    return Worker.objects.get(pk=row.pk).heartbeat_at


def test_the_heartbeat_process_beats_from_a_late_beat_until_a_punctual_one(charge, eventually):
    helper, row = charge(interval=0.5)
    eventually(lambda: beat(row) > row.heartbeat_at, why="it did not speak")
    eventually(lambda: sessions_of_helpers() == 1)
    eventually(lambda: helper.say() or sessions_of_helpers() == 0, why="it did not fall silent")

    def is_silent():
        """Wait longer than an interval, but not until a beat is late. If this test was late, the process may beat."""
        helper.say()
        before = beat(row)
        time.sleep(0.6)
        return beat(row) == before

    eventually(is_silent, why="it spoke although the beats were in time")
    silent = beat(row)
    eventually(lambda: beat(row) > silent, why="it did not speak again")


def test_a_beat_of_the_heartbeat_process_restarts_the_continuous_beats_of_the_worker(charge, eventually):
    """After an outage this process may connect before all others. Its heartbeat must not count as uninterrupted."""
    _helper, row = charge()
    eventually(lambda: beat(row) > row.heartbeat_at, why="it did not speak")
    after = Worker.objects.get(pk=row.pk)
    assert row.heartbeat_at < after.heartbeat_at <= after.beating_since


def test_the_heartbeat_process_stops_beating_after_a_time_limit(monkeypatch):
    """If a process could not run for an hour, its state will not end by itself."""
    substitute, written = heartbeat_process_main.SubstituteHeartbeat(), []
    monkeypatch.setattr(substitute, "_write", written.append)
    substitute.beat()
    substitute._since -= heartbeat_process_main.LONGEST + 1
    substitute.beat()
    assert len(written) == 1
    substitute.pause()
    substitute.beat()
    assert len(written) == 2


def test_stopped_processes_and_zombies_do_not_count_as_running(eventually):
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert heartbeat_process_main.is_running(process.pid)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: not heartbeat_process_main.is_running(process.pid), why="it is stopped")
        process.send_signal(signal.SIGCONT)
        eventually(lambda: heartbeat_process_main.is_running(process.pid))
        process.kill()
        eventually(lambda: not heartbeat_process_main.is_running(process.pid), why="it is a zombie")
    finally:
        process.kill()
        process.wait()
    assert not heartbeat_process_main.is_running(process.pid)
