"""The messages of a worker to systemd, at a socket like that of systemd."""

from __future__ import annotations

import os
import socket
import sys
import threading
from queue import SimpleQueue
from uuid import uuid4

import pytest
from django.db import OperationalError

from django_pglock.worker import service
from django_pglock.worker.parent.health import watchdog_limit
from tests.db.worker.parent.conftest import terminate

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets"),
]


@pytest.fixture(params=["file", "abstract"])
def messages(request, tmp_path, monkeypatch):
    """Replace systemd; return a function that returns the messages since its last call."""
    if request.param == "abstract" and sys.platform != "linux":
        pytest.skip("abstract sockets are Linux's")
    name = f"@{uuid4().hex}" if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(f"\0{name[1:]}" if name[0] == "@" else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)

        came = SimpleQueue()

        def listen():
            while data := channel.recv(4096):
                came.put(data.decode())

        # A thread reads all the time, because the kernel keeps at most ten unread messages.
        listener = threading.Thread(target=listen, daemon=True)
        listener.start()

        def take():
            lines = []
            send(b"the end")
            while (text := came.get(timeout=60)) != "the end":
                lines += text.split("\n")
            return lines

        def send(data):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(data, channel.getsockname())

        yield take
        send(b"")
        listener.join(60)


def test_systemd_is_notified_of_start_heartbeats_and_end(messages, worker, eventually, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    running = worker()
    lines = []

    def has_heard(*wanted):
        lines.extend(messages())
        return all(line in lines for line in wanted)

    wanted = ("READY=1", "WATCHDOG=1", "STATUS=0 tasks running")
    eventually(lambda: has_heard(*wanted), why="not all was told")
    assert "STOPPING=1" not in lines
    running.shutdown()
    assert has_heard("STOPPING=1", "STATUS=The worker is stopping.")


def refuse(*args, **options):
    raise OperationalError("no server at the moment")


@pytest.mark.parametrize("messages", ["abstract"], indirect=True)
def test_a_worker_without_database_still_lives_for_systemd(messages, worker, eventually, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    worker()
    monkeypatch.setattr(service, "dedicated_connection", refuse)
    terminate("heartbeat")
    eventually(lambda: "STATUS=The worker has no connection to the database." in messages())
    lines = []
    eventually(lambda: lines.extend(messages()) or len(lines) > 3)
    assert "WATCHDOG=1" in lines


def test_a_missing_socket_is_logged_once_and_the_worker_continues(worker, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert worker().shutdown() is True
    assert caplog.text.count("Messages to NOTIFY_SOCKET cannot be sent") == 1


@pytest.mark.parametrize(
    ("environment", "limit"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "nonsense"}, None),
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "ours"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "1"}, None),
    ],
)
def test_the_watchdog_limit_of_systemd_is_used_only_by_the_watched_process(monkeypatch, environment, limit):
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(os.getpid()) if value == "ours" else value)
    assert watchdog_limit() == limit
