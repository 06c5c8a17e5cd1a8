"""The parent side of the heartbeat process. ``tests/acceptance`` has what it does for a worker."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest
from django.db import OperationalError

from django_pglock.worker.liveness.heartbeat_process import INSTRUCT_AGAIN_AFTER, HeartbeatProcess


def test_a_process_follows_old_instructions_while_there_is_no_connection(caplog):
    """The server may accept no more at the moment."""

    def instructions():
        raise OperationalError("too many clients already")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = HeartbeatProcess(instructions)
        process._socket, process._asked_at = ours, time.monotonic() - INSTRUCT_AGAIN_AFTER - 1
        process._newest = process._sent = {"interval": 3.0}
        assert process.needs_instructions
        with pytest.raises(OperationalError):
            process.renew_instructions()
        assert not process.needs_instructions, "each pass of the service would ask again"
        for _ in range(2):
            process.report_beat()
            assert theirs.recv(10) == b"\n", "it learns of the beat"
        assert process._socket is ours
    assert not caplog.records


def test_new_instructions_are_sent_once():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = HeartbeatProcess(lambda: {"interval": 0.5, "password": "new"})
        process._socket, process._newest = ours, {"interval": 0.5, "password": "old"}
        process._sent = process._newest
        process.renew_instructions()
        process.report_beat()
        interval, pid, text = theirs.recv(65536).split(b" ", 2)
        assert (float(interval), int(pid), json.loads(text)["password"]) == (0.5, os.getpid(), "new")
        process.report_beat()
        assert theirs.recv(10) == b"\n"
