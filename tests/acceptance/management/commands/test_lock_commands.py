"""``locks`` and ``withlock`` as people type them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_pglock import Lease, LockLost
from django_pglock.models import AdvisoryLock
from django_pglock.testing import assert_locked, assert_no_locks, assert_not_locked, hold
from tests.conftest import ROOT
from tests.db.locks.test_api import Somebody

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def withlock(*arguments, **environment):
    return manage("withlock", *arguments, **environment)


def manage(*arguments, **environment):
    url = f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{connection.settings_dict['NAME']}"
    return subprocess.Popen(
        [sys.executable, str(ROOT / "manage.py"), *arguments],
        env={
            **os.environ,
            "DATABASE_URL": url,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": str(ROOT),
            **environment,
        },
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def python(code):
    return (sys.executable, "-c", code)


@pytest.mark.parametrize(
    ("code", "expected"), [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_commands_exit_code_is_passed_through(code, expected):
    process = withlock("deploy", "--", *python(code))
    process.communicate(timeout=120)
    assert process.returncode == expected
    assert_no_locks()


def test_the_lock_is_held_while_the_command_runs_and_signals_reach_it(eventually):
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(42)); print('in', flush=True); time.sleep(600)"
    )
    process = withlock("deploy", "--", *python(code))
    assert process.stdout.readline() == "in\n"
    assert_locked("deploy")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 42
    assert_not_locked("deploy")


@pytest.mark.parametrize(("options", "expected"), [(("--timeout", "0.1"), 75), (("--skip",), 0)])
def test_a_busy_lock_is_told_and_nothing_runs(options, expected):
    with hold("deploy"):
        process = withlock("deploy", *options, "--", *python("print('ran')"))
        out, err = process.communicate(timeout=120)
    assert process.returncode == expected
    assert "ran" not in out
    assert "Lock 'deploy' is held by somebody else" in err


def test_the_lock_is_of_the_scope_that_the_settings_say():
    """Behind a pooler in transaction mode a session lock would exclude nobody."""
    settings = {"DJANGO_SETTINGS_MODULE": "tests.settings_transaction_scope"}
    code = "print('in', flush=True); input(); raise SystemExit(7)"
    process = withlock("deploy", "--", *python(code), **settings)
    assert process.stdout.readline() == "in\n"
    assert AdvisoryLock.objects.for_name("deploy").get().state == "idle in transaction"
    process.communicate("\n", timeout=120)
    assert process.returncode == 7
    assert_no_locks()


def test_a_number_is_a_name_here():
    """In Python lock(5) is the number itself."""
    with hold(5):
        process = withlock("5", "--skip", "--", *python("print('ran')"))
        assert process.communicate(timeout=120) == ("ran\n", "")


@pytest.mark.parametrize("settings", ["tests.settings", "tests.settings_transaction_scope"])
def test_a_lost_lock_ends_the_command(eventually, settings):
    code = "print('in', flush=True); import time; time.sleep(600)"
    process = withlock("deploy", "--", *python(code), DJANGO_SETTINGS_MODULE=settings)
    assert process.stdout.readline() == "in\n"
    row = eventually(lambda: AdvisoryLock.objects.for_name("deploy").first())
    assert AdvisoryLock.objects.terminate(row.pid)
    _out, err = process.communicate(timeout=120)
    assert process.returncode == 70
    assert "was lost" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("deploy",), "no command"),
        (("deploy", "--", "/no/such/program"), "No such file"),
        (("", "--", "true"), "empty"),
        (("deploy", "--database", "nope", "--", "true"), "DATABASES has no 'nope'; it has default"),
    ],
)
def test_wrong_use_gets_a_sentence(arguments, text):
    process = withlock(*arguments)
    _out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert text in err
    assert "Traceback" not in err


def locks(*arguments):
    out = StringIO()
    call_command("locks", *arguments, stdout=out)
    return out.getvalue()


def test_locks_are_shown_to_people_and_to_programs(in_threads, eventually):
    from django_pglock import lock

    assert "No advisory lock" in locks()
    with hold("order:5"):
        assert locks("order:5").splitlines()[0].split() == [
            "LOCK",
            "MODE",
            "SESSION",
            "WAITS",
            "FOR",
            "SINCE",
            "APPLICATION",
        ]
        assert "django_pglock.testing" in locks("order:5")
        assert "No advisory lock" in locks("--blocked")

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
        (("--database", "nope"), "DATABASES has no 'nope'; it has default"),
        (("--watch", "-1"), "'-1' are no seconds"),
        (("--watch", "nan"), "'nan' are no seconds"),
        (("--watch", "1e300"), "'1e300' are no seconds"),
        (("--watch", "0"), "'0' is not above zero"),
        (("--free-lease", "a", "--terminate", "1"), "not allowed with"),
        (("--blocked", "--leases"), "not allowed with"),
    ],
)
def test_what_cannot_be_meant_gets_a_sentence(arguments, text):
    with pytest.raises(CommandError, match=text):
        locks(*arguments)


def test_who_reads_may_have_enough():
    """As in "locks --watch | head -1", which ends with its first line, and not with a traceback."""
    with manage("locks", "--watch", "0.1") as process:
        assert "No advisory lock" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


def test_only_sessions_with_locks_are_terminated():
    somebody = Somebody()
    try:
        pid = somebody.ask("SELECT pg_backend_pid()")
        with pytest.raises(CommandError, match="neither holds nor waits for"):
            locks("--terminate", str(pid))
    finally:
        somebody.leaves()


def test_leases_are_shown_and_taken_away():
    def locks(*arguments):
        call_command("locks", *arguments, stdout=(out := StringIO()))
        return out.getvalue()

    assert locks("--leases") == "No lease is held.\n"
    with pytest.raises(LockLost), Lease("night\tly", ttl=60) as lease, Lease("mutex"):
        table = locks("--leases")
        assert "night?ly" in table
        assert lease.owner in table
        assert table.count("\n") == 3
        [row] = json.loads(locks("--leases", "night\tly", "--json"))
        assert (row["name"], row["token"]) == ("night\tly", 1)
        assert "taken away" in locks("--free-lease", "night\tly")
        with pytest.raises(CommandError, match="No lease of the name"):
            locks("--free-lease", "night\tly")
