"""The socket of a process to the heartbeat that several processes share."""

from __future__ import annotations

import socket
import threading
from uuid import uuid4

import pytest

from django_pglock.store.liveness import Beat, HeartbeatReply
from django_pglock.worker.liveness.json_lines import JsonLines
from django_pglock.worker.liveness.supervisor_heartbeat import SupervisorHeartbeat
from tests.conftest import NEVER

BEAT = Beat(uuid4(), name="n", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
REPLY = [3, True, 0, 0, 1, False]


@pytest.fixture
def told():
    """Records what the process gets: notifications, and that some may have been missed."""
    return []


@pytest.fixture
def ends(told):
    """The process's heartbeat, and the supervisor's end of it."""
    ours, theirs = socket.socketpair()
    heartbeat = SupervisorHeartbeat(
        theirs,
        on_notification=lambda *news: told.append(news),
        on_missed_notifications=lambda: told.append("missed"),
    )
    yield heartbeat, JsonLines(ours)
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
    return {"beaten": REPLY, "is_listening": True, "next_in": 2.5, **values}


def test_the_answer_says_what_the_row_says(ends, answering):
    heartbeat, _ = ends
    answering(answer())
    assert heartbeat.request_beat(BEAT, within=NEVER) == (HeartbeatReply(*REPLY), True, 2.5)
    assert heartbeat.is_up


def test_the_answer_to_an_earlier_request_is_none(ends, answering):
    heartbeat, _ = ends
    answering(answer(asked_at=1.0, next_in=1.0), answer())
    assert heartbeat.request_beat(BEAT, within=NEVER).next_in == 2.5
    answering(answer(asked_at=1.0), {"can_beat": False})
    assert heartbeat.request_beat(BEAT, within=NEVER) is None


def test_a_silent_supervisor_gets_no_second_request_before_it_answers(ends):
    heartbeat, supervisor = ends
    assert heartbeat.request_beat(BEAT, within=0.01) is None
    assert (heartbeat.is_up, heartbeat.is_over) == (False, False)
    supervisor.send(answer(asked_at=1.0))
    heartbeat.receive()
    assert heartbeat.is_up


def test_a_supervisor_that_beats_again_may_have_missed_notifications(ends, told):
    heartbeat, supervisor = ends
    supervisor.send({"can_beat": False})
    supervisor.send({"heard": ["channel", "payload"]})
    heartbeat.receive()
    assert (told, heartbeat.is_up) == ([("channel", "payload")], False)
    supervisor.send({"can_beat": True})
    heartbeat.receive()
    assert (told[1:], heartbeat.is_up) == (["missed"], True)


def test_a_supervisor_that_has_died_is_not_waited_for(ends):
    heartbeat, supervisor = ends
    supervisor.close()
    assert heartbeat.request_beat(BEAT, within=NEVER) is None
    assert heartbeat.is_over
