"""A loop of the user that NOTIFY wakes."""

from __future__ import annotations

import logging
from contextlib import closing

import pytest
from django.db import OperationalError, connection, transaction

from django_pglock import listen, notify
from django_pglock.postgres import notifications
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)

SESSIONS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'django_pglock listen'"


def sessions():
    with connection.cursor() as cursor:
        cursor.execute(SESSIONS)
        return [pid for (pid,) in cursor.fetchall()]


@pytest.fixture
def letters():
    """A loop after its first turn, so it listens."""
    with closing(listen("letters", poll=NEVER)) as loop:
        assert next(loop) == []
        yield loop


def test_listen_yields_at_once_and_after_each_commit_that_notifies(letters):
    for payload in ("first", "second"):
        with transaction.atomic():
            notify("letters", payload)
        assert next(letters) == [payload]


def test_a_rollback_sends_no_notification(letters):
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        notify("letters", "rolled back")
        1 / 0  # noqa: B018
    notify("letters", "committed")
    assert next(letters) == ["committed"]


def test_notifications_during_a_pass_arrive_together_in_the_next_pass(letters):
    with transaction.atomic():
        for number in range(3):
            notify("letters", str(number))
    assert next(letters) == ["0", "1", "2"]


def test_listen_yields_after_the_poll_interval_without_a_notification():
    with closing(listen("letters", poll=0.01)) as loop:
        assert [next(loop), next(loop), next(loop)] == [[], [], []]


def test_a_notification_reaches_only_listeners_of_its_channel(letters):
    with closing(listen('An "odd" name; SELECT 1', poll=NEVER)) as odd:
        next(odd)
        notify('An "odd" name; SELECT 1', "for the odd one")
        notify("letters", "for the other")
        assert next(odd) == ["for the odd one"]
    assert next(letters) == ["for the other"]


def test_a_lost_session_is_replaced_and_the_loop_looks_for_what_it_may_have_missed(letters, caplog):
    [lost] = sessions()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [lost])
    with caplog.at_level(logging.WARNING):
        assert next(letters) == []
    assert "The session that listens on 'letters' is lost" in caplog.text
    notify("letters", "again")
    assert next(letters) == ["again"]
    assert lost not in sessions()


def test_an_unreachable_server_is_tried_again(letters, monkeypatch):
    failures = [OperationalError("away"), OperationalError("still away")]
    opened = notifications._open

    def refuse(using, channel):
        if failures:
            raise failures.pop()
        return opened(using, channel)

    monkeypatch.setattr(notifications, "_open", refuse)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", sessions())
    assert next(letters) == []
    assert not failures


def test_an_unreachable_server_at_the_start_is_an_error(monkeypatch):
    def refuse(using, channel):
        raise OperationalError("away")

    monkeypatch.setattr(notifications, "_open", refuse)
    with pytest.raises(OperationalError, match="away"):
        next(listen("letters"))


def test_a_listen_loop_that_is_left_closes_its_session(eventually):
    for _ in listen("letters", poll=NEVER):
        assert sessions()
        break
    eventually(lambda: not sessions())


def test_the_connection_of_the_loops_own_thread_is_checked_before_each_turn(letters):
    """As before each request of Django. Otherwise all queries of the loop would fail after a restart of the server."""
    connection.ensure_connection()
    connection.close_at = 0
    notify("letters")
    next(letters)
    assert connection.connection is None


@pytest.mark.parametrize("channel", [5, None, "", "x" * 64, "ü" * 32, "a\0b", "\ud800", b"letters"])
def test_a_channel_that_the_server_would_refuse_or_cut_is_refused(channel, eventually):
    # The server may still be ending the session of an earlier test.
    eventually(lambda: sessions() == [])
    with pytest.raises(ValueError, match=r"^The channel is .*; give a text of 1 to 63 bytes\.$"):
        notify(channel)
    with pytest.raises(ValueError, match=r"^The channel is .*; give a text of 1 to 63 bytes\.$"):
        next(listen(channel))
    assert sessions() == []


@pytest.mark.parametrize("payload", [5, None, "x" * 8000, "a\0b", "\ud800"])
def test_a_payload_that_the_server_would_refuse_is_refused(payload):
    with pytest.raises(ValueError, match=r"^The payload is .{,50}; give a text of 0 to 7999 bytes\.$"):
        notify("letters", payload)


def test_the_longest_channel_and_payload_arrive():
    channel, payload = "ü" * 31 + "x", "x" * 7999
    with closing(listen(channel, poll=NEVER)) as loop:
        next(loop)
        notify(channel, payload)
        assert next(loop) == [payload]
