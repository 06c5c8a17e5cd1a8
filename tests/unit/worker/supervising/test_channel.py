"""The channel between the supervisor and a process, from the process's end."""

from __future__ import annotations

import os
import socket

import pytest

from django_pglock.worker.supervising.channel import (
    HEARTBEAT_FD,
    NUMBER,
    SupervisorChannel,
    to_supervisor,
)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        yield ours, theirs


@pytest.fixture
def channel(pair):
    """Return the channel of a process, the supervisor's end, and what the process was told."""
    told = []
    made = SupervisorChannel(
        pair[1], on_supervisor_gone=lambda: told.append("gone"), on_stop_now=lambda: told.append("stop now")
    )
    pair[1].settimeout(0.01)
    return made, pair[0], told


def test_a_process_takes_its_sockets_once_and_leaves_none_to_the_programs_of_its_tasks(pair, monkeypatch):
    """A program that gets the channel as its stdin would read the messages, and keep it open after a death."""
    supervisor, stdin = pair
    heartbeat, inherited = socket.socketpair()
    monkeypatch.setenv(NUMBER, "3")
    monkeypatch.setenv(HEARTBEAT_FD, str(inherited.detach()))
    own_stdin = os.dup(0)
    os.dup2(stdin.fileno(), 0)
    try:
        sockets = to_supervisor()
        assert os.path.samestat(os.fstat(0), os.stat(os.devnull)), "as under a service manager"
    finally:
        os.dup2(own_stdin, 0)
        os.close(own_stdin)
    with heartbeat, sockets.channel, sockets.heartbeat:
        assert sockets.number == 3
        for sender, receiver in ((supervisor, sockets.channel), (heartbeat, sockets.heartbeat)):
            sender.send(b"x")
            assert receiver.recv(1) == b"x"
            assert not os.get_inheritable(receiver.fileno())
    assert to_supervisor() is None
    assert {NUMBER, HEARTBEAT_FD}.isdisjoint(os.environ)
