"""One worker process, from the supervisor's end."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from django_pglock.worker.supervising.child_process import ChildProcess
from tests.conftest import NEVER

#: Says its number, and ends when it has read a message.
TALKS = ["/bin/sh", "-c", 'printf "$DJANGO_PGLOCK_PROCESS" >&0; head -c 1 >/dev/null']


def test_a_process_and_its_supervisor_exchange_messages_until_it_ends(eventually):
    child = ChildProcess(12, TALKS)
    with child.channel:
        assert child.last_message_at is None, "a start may take any time"
        assert eventually(child.receive) == b"12"
        assert child.last_message_at is not None
        assert child.receive() is None
        child.stop_now(within=NEVER)
        assert child.process.wait(NEVER) == 0
        assert child.receive() == b""
        assert child.last_message_at is None, "silence is no sign of a frozen process any more"
    child.stop_now(within=NEVER)  # it may have ended at this moment


@pytest.mark.parametrize("has_shared_heartbeat", [False, True])
def test_a_process_that_cannot_be_started_leaves_no_socket(has_shared_heartbeat):
    added = []
    shared = SimpleNamespace(add=added.append) if has_shared_heartbeat else None
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(FileNotFoundError):
        ChildProcess(1, ["/nowhere/python"], shared)
    assert len(os.listdir("/dev/fd")) == before
    assert not added
