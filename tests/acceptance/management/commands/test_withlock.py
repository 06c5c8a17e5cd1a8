"""``manage.py withlock``: exit codes, signals, busy and lost locks."""

from __future__ import annotations

import signal
import sys

import pytest

from django_pglock.models import AdvisoryLock
from django_pglock.testing import assert_locked, assert_no_locks, assert_not_locked, hold
from tests.acceptance.management.commands.processes import manage

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def withlock(*arguments, **environment):
    return manage("withlock", *arguments, **environment)


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
    """lock(5) in Python uses the number 5 as the key."""
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
        (("deploy", "--database", "nope", "--", "true"), "DATABASES has no alias 'nope'. Its aliases: default"),
    ],
)
def test_wrong_use_gets_a_sentence(arguments, text):
    process = withlock(*arguments)
    _out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert text in err
    assert "Traceback" not in err
