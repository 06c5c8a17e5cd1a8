"""The file whose age is that of the last heartbeat."""

from __future__ import annotations

import socket
import time

import pytest
from django.core.management import CommandError, call_command

from django_pglock.errors import ConfigurationError
from django_pglock.models import Worker
from django_pglock.worker.probes.probes import HeartbeatFile
from django_pglock.worker.supervising.channel import SupervisorSockets
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_file_is_touched_at_each_beat_and_removed_at_the_end(worker, eventually, tmp_path):
    path = tmp_path / "alive"
    running = worker(heartbeat_file=str(path))
    first = eventually(lambda: path.exists() and path.stat()).st_mtime_ns
    assert abs(first / 1e9 - time.time()) < NEVER
    eventually(lambda: path.stat().st_mtime_ns > first)
    running.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_a_beat_that_was_not_written_does_not_touch_it(worker, eventually, tmp_path, monkeypatch):
    path = tmp_path / "alive"
    running = worker(heartbeat_file=str(path))
    eventually(path.exists)
    monkeypatch.setattr(running.heartbeat, "beat", lambda: 1 / 0)
    eventually(lambda: running.heartbeat._failures > 0)
    before = path.stat().st_mtime_ns
    eventually(lambda: running.heartbeat._failures > 2)
    assert path.stat().st_mtime_ns == before


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    for path in (tmp_path / "nowhere" / "alive", tmp_path):
        with pytest.raises(ConfigurationError, match=f"The heartbeat file {path} cannot be written: "):
            HeartbeatFile(str(path)).check()
        with pytest.raises(CommandError, match="cannot be written"):
            call_command("runlockworker", "--heartbeat-file", str(path), "--no-reload")
    assert list(tmp_path.iterdir()) == [], "the check makes nothing: no beat has been written"


def test_a_heartbeat_file_that_cannot_be_written_later_is_logged_once(worker, eventually, tmp_path, caplog):
    path = tmp_path / "folder" / "alive"
    path.parent.mkdir()
    running = worker(heartbeat_file=str(path))
    eventually(path.exists)
    path.parent.rename(tmp_path / "away")  # in one step: a heartbeat between two steps would create the file again
    eventually(lambda: "cannot be written. The worker continues" in caplog.text)
    for _ in range(2):
        before = Worker.objects.get().heartbeat_at
        eventually(lambda: Worker.objects.get().heartbeat_at > before)  # noqa: B023
    assert caplog.text.count("cannot be written") == 1
    path.parent.mkdir()
    eventually(path.exists, why="it is made again")
    running.shutdown()
    assert not path.exists()


def test_each_process_of_a_supervisor_has_a_file_of_its_own(tmp_path):
    names = [HeartbeatFile(str(tmp_path / "alive"), number=number).path.name for number in (1, 2, 3)]
    assert names == ["alive", "alive.2", "alive.3"]


def test_a_process_that_is_replaced_leaves_its_file_to_the_other(worker, eventually, tmp_path):
    """The processes overlap. Heartbeats of the old one would hide missing ones of the new one."""
    path = tmp_path / "alive.2"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        running = worker(heartbeat_file=str(tmp_path / "alive"), supervisor=SupervisorSockets(2, theirs))
        eventually(path.exists)
        running.retire()
        eventually(lambda: not path.exists())
        path.touch()
        running.shutdown()
        assert path.exists()
