"""Conclusions from the report of the server about a session on which no answer comes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from django.db import OperationalError

from django_pglock.postgres.activity import Activity, ServerView
from django_pglock.postgres.pending_statements import PendingStatement
from django_pglock.worker.liveness.session_watch import (
    CHECKS_BEHIND_POOLER,
    QUESTIONS_BEFORE_END,
    SilentSession,
)

PID = 4711


def silence(checks=20, is_on_standby=False):
    pgconn = SimpleNamespace(backend_pid=PID, parameter_status=lambda name: b"on" if is_on_standby else b"off")
    silence = SilentSession(PendingStatement(SimpleNamespace(pgconn=pgconn), "default"))
    silence.checks = checks
    return silence


def view(state=None, since=60.0, *, waits_for_client=False, is_standby=False):
    sessions = {} if state is None else {PID: Activity(state, waits_for_client, since)}
    return ServerView(is_standby, sessions)


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (view("active"), ""),
        (view("active", 86400.0), ""),
        (view("idle"), "the session is idle at the server"),
        (view("idle in transaction"), "the session is idle in transaction at the server"),
        (view("idle in transaction (aborted)"), "the session is idle in transaction (aborted) at the server"),
        (view("idle", 1.0), ""),  # the answer may not have arrived
        (view("disabled"), ""),  # track_activities is off
        (ServerView(False, {PID: Activity(None, False, 0.0)}), ""),  # a session of another program
        (view(), "the server has no such session"),
        (view(is_standby=True), ""),  # another standby at the same address may have it
        (view("idle", is_standby=True), ""),  # and this number may be that of another session
    ],
)
def test_the_answer_of_the_server_decides(seen, verdict):
    asked = silence()
    asked.note(seen)
    assert asked.verdict == verdict


def test_the_primary_says_nothing_of_a_session_of_a_standby():
    asked = silence(is_on_standby=True)
    asked.note(view())
    assert asked.verdict == ""


@pytest.mark.parametrize(("receives_nothing", "verdict"), [(True, "the server waits for the client"), (False, "")])
def test_a_session_that_waits_for_the_client_is_ended_after_several_equal_answers(
    monkeypatch, receives_nothing, verdict
):
    """One query may come at a moment in which the server waits until the client has read a long answer."""
    monkeypatch.setattr(SilentSession, "_receives_nothing", lambda self: receives_nothing)
    asked = silence()
    for _ in range(QUESTIONS_BEFORE_END - 1):
        asked.note(view("active", waits_for_client=True))
    assert asked.verdict == ""
    asked.note(view("active"))
    for _ in range(QUESTIONS_BEFORE_END):
        assert asked.verdict == ""
        asked.note(view("active", waits_for_client=True))
    assert asked.verdict == verdict


@pytest.mark.parametrize(
    ("checks", "oldest", "verdict"),
    [(44, 0.0, False), (45, 0.0, True), (45, 45.0, False), (45, 39.0, True), (3600, float("inf"), False)],
)
def test_behind_a_pooler_the_oldest_statement_decides(checks, oldest, verdict):
    asked = silence(checks)
    asked.note(ServerView(False, None, oldest))
    assert bool(asked.verdict) == verdict


@pytest.mark.parametrize("is_standby", [False, True])
def test_behind_a_pooler_only_the_answer_says_whether_the_server_is_a_standby(is_standby):
    """A pooler repeats the report of the first server behind it."""
    asked = silence(CHECKS_BEHIND_POOLER, is_on_standby=True)
    asked.note(ServerView(is_standby, None, 0.0))
    assert bool(asked.verdict) == (not is_standby)


def test_the_server_counts_as_unreachable_after_three_queries_without_an_answer():
    asked = silence()
    for _ in range(QUESTIONS_BEFORE_END - 1):
        asked.note_failure(OperationalError("timeout"), has_answered=False)
    asked.note_failure(OperationalError("too many clients"), has_answered=True)
    assert asked.verdict == ""
    for _ in range(QUESTIONS_BEFORE_END):
        assert asked.verdict == ""
        asked.note_failure(OperationalError("timeout"), has_answered=False)
    assert asked.verdict == "the server cannot be reached"


def test_a_late_answer_of_a_pooler_is_compared_with_the_time_of_its_question():
    """The reported age was that of our statement, which has waited for seven more seconds by now."""
    asked = silence(52)
    asked.asked_at = 45
    asked.note(ServerView(False, None, 45.0))
    assert asked.verdict == ""
    asked.note(ServerView(False, None, 39.0))
    assert asked.verdict
