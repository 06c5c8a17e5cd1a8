"""Lines of JSON between a supervisor and its processes."""

from __future__ import annotations

import socket

import pytest

from django_pglock.worker.liveness import json_lines
from django_pglock.worker.liveness.json_lines import JsonLines


@pytest.fixture
def ends():
    pair = socket.socketpair()
    yield [JsonLines(end) for end in pair]
    for end in pair:
        end.close()


def test_messages_come_in_order_and_once(ends):
    here, there = ends
    here.send({"number": 1})
    here.send({"number": 2, "text": "two\nlines"})
    assert there.receive() == [{"number": 1}, {"number": 2, "text": "two\nlines"}]
    assert there.receive() == []
    there.send({"answer": None})
    assert here.receive() == [{"answer": None}]
    assert (here.is_over, there.is_over) == (False, False)


def test_half_a_message_waits_for_its_rest():
    end, other = socket.socketpair()
    with end, other:
        lines = JsonLines(end)
        other.sendall(b'{"a": 1}\n{"b"')
        assert lines.receive() == [{"a": 1}]
        other.sendall(b": 2}\n")
        assert lines.receive() == [{"b": 2}]


def test_messages_sent_before_the_end_are_received(ends):
    here, there = ends
    here.send({"last": True})
    here.close()
    assert there.receive() == [{"last": True}]
    assert there.is_over
    there.send({"too": "late"})


def test_a_channel_that_is_not_read_ends(ends, monkeypatch):
    monkeypatch.setattr(json_lines, "READ_WITHIN", 0.01)
    here, _ = ends
    for _ in range(1000):
        here.send({"text": "x" * 10_000})
    assert here.is_over
