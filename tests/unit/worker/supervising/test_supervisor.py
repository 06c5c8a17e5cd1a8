"""The rules of the supervisor, with substitutes for worker processes."""

from __future__ import annotations

import math
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from django_pglock.worker.supervising import supervisor
from django_pglock.worker.supervising.supervisor import Supervisor

#: The first lines of each process: the number of its start, from 1, and the channel to the supervisor.
BEGIN = """
import os, signal, socket, sys, time
channel = socket.socket(fileno=os.dup(0))
with open(sys.argv[1], "a") as starts:
    print(os.environ["DJANGO_PGLOCK_PROCESS"], os.getpid(), os.getsid(0) == os.getpid(), file=starts, flush=True)
with open(sys.argv[1]) as starts:
    start = len(starts.readlines())
"""


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Run a supervisor of this script to its end; return its exit code and the lines that the processes left."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.02)

    def run(script, *, processes=1, grace=0.0, silence=30.0, drain=True):
        log = tmp_path / "starts"
        command = [sys.executable, "-S", "-E", "-c", BEGIN + script, str(log)]
        code = Supervisor(command, processes=processes, grace=grace, silence=silence, drain=drain).run()
        return code, log.read_text().splitlines()

    return run


def test_the_pauses_grow_until_a_process_has_lived_for_long_enough(supervise, monkeypatch):
    failures = []
    monkeypatch.setattr(supervisor, "STABLE_AFTER", math.inf)

    def pause_after(number):
        failures.append(number)
        # Only the third process can live for long enough, however long the others take to start.
        monkeypatch.setattr(supervisor, "STABLE_AFTER", 0.5 if len(failures) == 2 else math.inf)
        return 0.0

    monkeypatch.setattr(supervisor, "pause_after", pause_after)
    supervise("time.sleep(0.7 if start == 3 else 0); sys.exit(start < 5)")
    assert failures == [1, 2, 1, 2]


def test_without_drain_an_exit_code_of_0_counts_as_unexpected(supervise, monkeypatch):
    monkeypatch.setattr(supervisor, "pause_after", lambda number: 0.0)
    code, starts = supervise("start < 3 or os.kill(os.getppid(), signal.SIGTERM) or time.sleep(600)", drain=False)
    assert (code, len(starts)) == (0, 3), "one that SIGTERM ends before it waits for it has ended in order"


def test_a_process_that_requests_it_is_replaced_without_a_pause(supervise, monkeypatch):
    """The first ends only when it sees that the second has begun."""
    monkeypatch.setattr(supervisor, "pause_after", lambda number: pytest.fail("that is no failure"))
    script = """
if start == 1:
    channel.send(b"rr")
    while len(open(sys.argv[1]).readlines()) < 2:
        time.sleep(0.01)
    sys.exit(3)
"""
    assert supervise(script)[0] == 0


def test_a_process_that_starts_slowly_is_not_frozen(supervise):
    assert len(supervise("time.sleep(0.5)", silence=0.1)[1]) == 1


@pytest.mark.parametrize(("longest", "seconds", "count"), [(3600, 1, 1), (0.3, 600, 2)])
def test_a_process_whose_heartbeat_process_beats_is_not_frozen(supervise, monkeypatch, longest, seconds, count):
    monkeypatch.setattr(supervisor, "CHECK_INTERVAL", 0.1)
    monkeypatch.setattr(supervisor, "LONGEST", longest)
    assert len(supervise(f"start > 1 or channel.send(b'.') and time.sleep({seconds})", silence=0.1)[1]) == count


IGNORES = """
signal.signal(signal.SIGTERM, lambda *_: None)
channel.send(b".")
os.kill(os.getppid(), signal.SIGTERM)
"""


def test_a_process_that_exceeds_grace_period_and_margin_is_killed(supervise, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "MARGIN", 0.2)
    code, starts = supervise(f"{IGNORES}\nwhile True: time.sleep(600)", grace=0.3)
    assert (code, len(starts)) == (1, 1)
    assert "has not ended in time" in caplog.text


def test_a_process_that_has_closed_its_channel_and_stays_is_killed(supervise, monkeypatch, caplog):
    """A task has closed all files of its process, and the process froze: no message shows that."""
    monkeypatch.setattr(supervisor, "MARGIN", 0.2)
    script = "start > 1 or (channel.send(b'.'), channel.close(), os.close(0), os.kill(os.getpid(), signal.SIGSTOP))"
    assert len(supervise(script)[1]) == 2
    assert "has not ended in time" in caplog.text


def test_a_process_that_cannot_be_started_is_tried_again(supervise, monkeypatch, caplog):
    popen, attempts = supervisor.subprocess.Popen, []

    def fail_twice(*args, **kwargs):
        attempts.append(1)
        if len(attempts) < 3:
            raise BlockingIOError(11, "no more processes")
        return popen(*args, **kwargs)

    monkeypatch.setattr(supervisor, "subprocess", SimpleNamespace(Popen=fail_twice))
    assert len(supervise("")[1]) == 1
    assert caplog.text.count("cannot be started") == 2


def test_the_supervisor_restores_signal_handlers_and_closes_files(supervise):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
    files = len(os.listdir("/dev/fd"))
    supervise("sys.exit(start < 3)")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)] == handlers
    assert len(os.listdir("/dev/fd")) == files
