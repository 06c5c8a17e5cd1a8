"""``manage.py locks``: tables, JSON, ended sessions and leases."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_pglock import Lease, LockLost, lock
from django_pglock.testing import hold
from tests.conftest import NEVER
from tests.db.locks.sessions import Somebody

pytestmark = pytest.mark.django_db(transaction=True)


def locks(*arguments):
    out = StringIO()
    call_command("locks", *arguments, stdout=out)
    return out.getvalue()


def test_locks_are_shown_to_people_and_to_programs(in_threads, eventually):
    assert locks() == "No advisory lock is held or awaited.\n"
    with hold("order:5"):
        assert locks("order:5").split()[:7] == ["LOCK", "MODE", "SESSION", "WAITS", "FOR", "SINCE", "APPLICATION"]
        assert "django_pglock.testing" in locks("order:5")
        assert locks("--blocked") == "No advisory lock matches.\n"

        def wait_or_look(number):
            if number:
                with lock("order:5", timeout=300):
                    return None
            eventually(lambda: "↳ order:5" in locks("--blocked"))
            [held, waiting] = json.loads(locks("order:5", "--json"))
            assert (held["is_granted"], held["name"], waiting["blocked_by"]) == (True, "order:5", [held["pid"]])
            call_command("locks", "--terminate", str(held["pid"]), stdout=StringIO())
            return True

        assert in_threads(wait_or_look, 2) == [True, None]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--database", "nope"), "DATABASES has no alias 'nope'. Its aliases: default"),
        (("--free-lease", "a", "--terminate", "1"), "not allowed with"),
        (("--blocked", "--leases"), "not allowed with"),
    ],
)
def test_invalid_arguments_raise_a_command_error(arguments, text):
    with pytest.raises(CommandError, match=text) as raised:
        locks(*arguments)
    # By call_command(), Django's parser raises an error with the code 1. On a command line it exits with 2.
    assert raised.value.returncode == (1 if str(raised.value).startswith("Error: ") else 2)


def test_only_sessions_with_locks_are_terminated():
    somebody = Somebody()
    try:
        pid = somebody.ask("SELECT pg_backend_pid()")
        with pytest.raises(CommandError, match="neither holds nor waits for"):
            locks("--terminate", str(pid))
    finally:
        somebody.leaves()


def test_the_times_of_leases_are_computed_by_the_clock_of_the_server(monkeypatch):
    an_hour_ago = timezone.now() - timedelta(hours=1)
    monkeypatch.setattr(timezone, "now", lambda: an_hour_ago)
    with Lease("nightly", ttl=100):
        *_, held_for, _unit, renewed, _unit, expires_in, _unit = locks("--leases").split()
    assert 0 <= int(held_for) <= NEVER
    assert 0 <= int(renewed) <= NEVER
    assert 100 - NEVER <= int(expires_in) <= 100


def test_leases_are_shown_and_revoked():
    assert locks("--leases") == "No lease is held.\n"
    with pytest.raises(LockLost), Lease("night\tly", ttl=60) as lease, Lease("mutex"):
        table = locks("--leases")
        assert "night?ly" in table
        assert lease.owner in table
        assert locks("--leases", "other") == "No lease matches.\n"
        assert table.count("\n") == 3
        [row] = json.loads(locks("--leases", "night\tly", "--json"))
        assert (row["name"], row["token"]) == ("night\tly", 1)
        assert "revoked" in locks("--free-lease", "night\tly")
        with pytest.raises(CommandError, match="No lease named"):
            locks("--free-lease", "night\tly")
