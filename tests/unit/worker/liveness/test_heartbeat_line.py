"""The process's end of the line to a heartbeat that several processes share."""

from __future__ import annotations

import socket
import threading
from uuid import uuid4

import pytest

from django_pglock.store.liveness import Beat, Beaten
from django_pglock.worker.liveness.heartbeat_line import HeartbeatLine
from django_pglock.worker.liveness.json_lines import JsonLines
from tests.conftest import NEVER

BEAT = Beat(uuid4(), name="n", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
BEATEN = [3, True, 0, 0, 1, False]


@pytest.fixture
def ends():
    """The process's line, and the supervisor's end of it."""
    ours, theirs = socket.socketpair()
    yield HeartbeatLine(theirs), JsonLines(ours)
    ours.close()
    theirs.close()


@pytest.fixture
def answering(ends, eventually):
    """Answer the next request with messages, which may know when it was made."""
    _, supervisor = ends
    threads = []

    def answer(*messages):
        def work():
            [request] = eventually(supervisor.receive)
            for message in messages:
                supervisor.send({**message, "asked_at": message.get("asked_at", request["asked_at"])})

        threads.append(threading.Thread(target=work))
        threads[-1].start()

    yield answer
    for thread in threads:
        thread.join()


def answer(**values):
    return {"beaten": BEATEN, "is_listening": True, "next_in": 2.5, **values}


def test_the_answer_says_what_the_row_says(ends, answering):
    line, _ = ends
    answering(answer())
    assert line.ask(BEAT, within=NEVER) == (Beaten(*BEATEN), True, 2.5)
    assert line.is_up


def test_the_answer_to_an_earlier_request_is_none(ends, answering):
    line, _ = ends
    answering(answer(asked_at=1.0, next_in=1.0), answer())
    assert line.ask(BEAT, within=NEVER).next_in == 2.5
    answering(answer(asked_at=1.0), {"can_beat": False})
    assert line.ask(BEAT, within=NEVER) is None


def test_a_supervisor_that_is_silent_is_not_asked_again_before_it_is_heard(ends):
    line, supervisor = ends
    assert line.ask(BEAT, within=0.01) is None
    assert (line.is_up, line.is_over) == (False, False)
    supervisor.send(answer(asked_at=1.0))
    line.receive()
    assert line.is_up


def test_one_that_can_beat_again_may_have_missed_notifications(ends):
    line, supervisor = ends
    told = []
    line.missed = lambda: told.append("missed")
    line.heard = lambda *news: told.append(news)
    supervisor.send({"can_beat": False})
    supervisor.send({"heard": ["channel", "payload"]})
    line.receive()
    assert (told, line.is_up) == ([("channel", "payload")], False)
    supervisor.send({"can_beat": True})
    line.receive()
    assert (told[1:], line.is_up) == (["missed"], True)


def test_a_supervisor_that_has_died_is_not_waited_for(ends):
    line, supervisor = ends
    supervisor.close()
    assert line.ask(BEAT, within=NEVER) is None
    assert line.is_over
