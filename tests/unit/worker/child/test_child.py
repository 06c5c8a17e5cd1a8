"""What a child tells its parent."""

from __future__ import annotations

import socket
from uuid import uuid4

from django_pglock import task
from django_pglock.worker.channel import Channel
from django_pglock.worker.child.child import Child
from tests.sample import scheduled

OPTIONS = {"number": 1, "using": "default", "backend": None, "queues": [], "exclude": [], "threads": 1, "grace": 1}


def test_functions_are_told_when_there_are_new_ones_and_not_at_each_check(own_registry):
    """Before, a child with a schedule told them each second, and each time its parent sent a heartbeat more."""
    ours, theirs = map(Channel, socket.socketpair())
    child = Child(theirs, {**OPTIONS, "id": str(uuid4()), "drain": False, "max_tasks": None, "max_memory": None})

    def told():
        child._check()
        return [name for message in ours.receive() for name in message.get("ready", (0, ()))[1]]

    task(every=5)(scheduled.nightly)
    assert "tests.sample.scheduled.nightly" in told()
    assert told() == []
    task(scheduled.with_argument)
    assert "tests.sample.scheduled.with_argument" in told()
    for end in (ours, theirs, child.loop):
        end.close()
