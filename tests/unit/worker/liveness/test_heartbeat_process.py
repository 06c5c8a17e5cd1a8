"""The parent side of the heartbeat process. ``tests/acceptance`` has what it does for a worker."""

from __future__ import annotations

import socket
import time

from django.db import OperationalError

from django_pglock.worker.liveness.heartbeat_process import INSTRUCT_AGAIN_AFTER, HeartbeatProcess


def test_a_process_goes_on_with_old_instructions_while_there_is_no_connection(caplog):
    """An idle worker under a supervisor has no session, and the server may accept no more at the moment."""

    def instructions():
        raise OperationalError("too many clients already")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = HeartbeatProcess(instructions)
        process._socket, process._instructed_at = ours, time.monotonic() - INSTRUCT_AGAIN_AFTER - 1
        for _ in range(2):
            process.note_beat()
            assert theirs.recv(10) == b"\n", "it learns of the beat"
        assert process._socket is ours
    assert not caplog.records
