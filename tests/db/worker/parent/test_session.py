"""The session in the loop. It uses parts of psycopg that are not documented, which each supported psycopg must have."""

from __future__ import annotations

import os
import signal
import socket
import threading

import psycopg
import pytest
from django.db import OperationalError

from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.worker.parent.session import Session
from tests.conftest import NEVER
from tests.db.worker.parent.conftest import fetch, sessions, terminate

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "lockworker tested"


class Observed(Session):
    """A session that notes what it calls."""

    def __init__(self, loop, open_=lambda: dedicated_connection("default", application_name=NAME)):
        self.opened, self.lost, self.notes = [], [], []

        def open_now():
            connection = open_()
            connection.ensure_connection()
            return connection

        super().__init__(
            loop,
            open_now,
            on_open=lambda: self.opened.append(1),
            on_lost=self.lost.append,
            on_note=lambda channel, payload: self.notes.append((channel, payload)),
        )

    def ask_now(self, *parts, within=NEVER, **options):
        """Ask, and return the rows or the refusal."""
        answers = []
        self.ask(*((part, ()) if isinstance(part, str) else part for part in parts), within=within,
                 then=answers.append, refused=answers.append, **options)  # fmt: skip
        return self.loop.until(lambda: answers or self.lost)[0]


@pytest.fixture
def session(loop):
    made = Observed(loop)
    made.open()
    made.open()
    loop.until(lambda: made.opened)
    yield made
    made.close()


def test_a_session_for_which_no_thread_can_start_is_opened_at_the_next_attempt(loop, monkeypatch):
    tried = Observed(loop)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no more threads")))
        tried.open()
    assert "no more threads" in str(tried.lost[0])
    tried.open()
    loop.until(lambda: tried.opened)
    tried.close()


def test_the_rows_of_each_statement_of_a_message_come_as_texts(session):
    answer = session.ask_now("SELECT 1, NULL, true", ("SELECT %s WHERE false", ("x",)), ("SELECT %s || 'ß'", ("ä",)))
    assert answer == [[("1", None, "t")], [], [("äß",)]]
    assert session.ask_now("SET lock_timeout = 0", "SELECT 2") == [[], [("2",)]]


def test_statements_are_sent_one_after_the_other(session):
    answers = []
    for number in range(50):
        session.ask(("SELECT %s::int", (number,)), within=NEVER, then=answers.append)
    session.loop.until(lambda: len(answers) == 50)
    assert answers == [[[(str(number),)]] for number in range(50)]


def test_a_large_statement_and_a_large_answer_do_not_stop_the_loop(session):
    """The kernel takes only a part of them at a time."""
    text, turns = "x" * 30_000_000, []
    session.loop.call_later(0.0, lambda: turns.append(1))
    answer = session.ask_now(("SELECT length(%s), repeat('y', 20000000)", (text,)))
    assert (answer[0][0][0], len(answer[0][0][1])) == ("30000000", 20_000_000)
    assert turns


def test_a_refused_statement_is_undone_with_its_message_and_the_session_lives(session):
    answer = session.ask_now("CREATE TEMPORARY TABLE undone ()", "SELECT 1 / 0", "SELECT 1")
    assert isinstance(answer, psycopg.errors.DivisionByZero)
    assert session.ask_now("SELECT to_regclass('undone')") == [[(None,)]]
    assert session.ask_now("SELECT syntax error here").sqlstate == "42601"
    assert not session.lost


def test_a_refusal_that_nobody_expects_ends_the_session(session):
    session.ask(("SELECT 1 / 0", ()), within=NEVER)
    session.ask(("SELECT 1", ()), within=NEVER, then=lambda rows: pytest.fail("it was forgotten"))
    [error] = session.loop.until(lambda: session.lost)
    assert isinstance(error, psycopg.errors.DivisionByZero)
    assert not session.is_open
    session.ask(("SELECT 1", ()), within=NEVER)  # without a session, nothing happens


def test_notifications_come_while_it_is_idle_and_during_a_statement(session):
    session.ask_now("LISTEN tested")
    fetch("SELECT pg_notify('tested', 'idle')")
    session.loop.until(lambda: session.notes)
    assert session.ask_now("SELECT pg_notify('tested', 'busy')", "SELECT 7") == [[("",)], [("7",)]]
    session.loop.until(lambda: len(session.notes) == 2)
    assert session.notes == [("tested", "idle"), ("tested", "busy")]


def test_a_notification_that_cannot_be_read_ends_no_statement(session, caplog):
    """Every role of the database may notify."""
    session.on_note = lambda channel, payload: int(payload)
    session.ask_now("LISTEN tested")
    fetch("SELECT pg_notify('tested', 'no number')")
    session.loop.until(lambda: "The worker met an error, and continues." in caplog.text)
    assert session.ask_now("SELECT pg_notify('tested', 'none')", "SELECT 8")[1] == [("8",)]
    assert session.ask_now("SELECT 9") == [[("9",)]]
    assert not session.lost


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_session_that_the_server_ends_is_noticed_and_another_can_be_opened(session, is_busy):
    if is_busy:
        session.ask(("SELECT pg_sleep(600)", ()), within=NEVER)
    session.loop.until(
        lambda: not is_busy or fetch("SELECT 1 FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%%'")
    )
    terminate("tested")
    session.loop.until(lambda: session.lost)
    session.open()
    session.loop.until(lambda: len(session.opened) == 2)
    session.lost.clear()
    assert session.ask_now("SELECT 1") == [[("1",)]]


def test_a_session_that_has_ended_before_it_is_asked_is_lost(session):
    with socket.socket(fileno=os.dup(session.connection.connection.pgconn.socket)) as end:
        end.shutdown(socket.SHUT_RDWR)
    session.ask(("SELECT 1", ()), within=NEVER)
    session.loop.until(lambda: session.lost)


@pytest.mark.skipif(os.geteuid() != 0, reason="stops a process of the server")
def test_a_server_process_that_does_not_answer_costs_a_session_and_not_the_loop(session, monkeypatch):
    [stopped] = sessions("tested")
    os.kill(stopped, signal.SIGSTOP)
    try:
        session.ask(("SELECT 1", ()), within=0.2, then=lambda rows: pytest.fail("it was stopped"))
        [error] = session.loop.until(lambda: session.lost)
        assert "has not answered in time" in str(error)
        session.lost.clear()
        session.open()
        session.loop.until(lambda: len(session.opened) == 2)
        assert session.ask_now("SELECT 1") == [[("1",)]]
    finally:
        os.kill(stopped, signal.SIGCONT)


def test_an_open_that_fails_is_told(loop):
    def refuse():
        raise OperationalError("no server")

    session = Observed(loop, refuse)
    session.open()
    [error] = loop.until(lambda: session.lost)
    assert str(error) == "no server"
    session.open()
    loop.until(lambda: len(session.lost) == 2)


def test_a_session_that_is_closed_while_it_is_opened_does_not_stay(loop):
    go_on = threading.Event()

    def wait():
        go_on.wait(NEVER)
        return dedicated_connection("default", application_name=NAME)

    session = Observed(loop, wait)
    session.open()
    session.close()
    session.open()
    go_on.set()
    loop.until(lambda: len(sessions("tested")) == 1)
    loop.until(lambda: session.opened)
    assert session.ask_now("SELECT 1") == [[("1",)]]
    session.close()
    loop.until(lambda: not sessions("tested"))
    assert session.opened == [1]
