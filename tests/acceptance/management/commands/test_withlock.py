"""``manage.py withlock``: exit codes, signals, busy and lost locks."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from django.db import connection

from django_pglock import LockLost, lock
from django_pglock.management.commands import withlock as withlock_command
from django_pglock.models import AdvisoryLock
from django_pglock.testing import assert_locked, assert_no_locks, assert_not_locked, hold
from tests.acceptance.management.commands.processes import django, manage

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
def test_withlock_reports_a_busy_lock_and_does_not_run_the_command(options, expected):
    with hold("deploy"):
        process = withlock("deploy", *options, "--", *python("print('ran')"))
        out, err = process.communicate(timeout=120)
    assert process.returncode == expected
    assert "ran" not in out
    assert "Lock 'deploy' is held by somebody else" in err


def test_withlock_takes_a_lock_of_the_scope_in_the_settings():
    """Behind a pooler in transaction mode, a session lock does not exclude other clients."""
    settings = {"DJANGO_SETTINGS_MODULE": "tests.settings_transaction_scope"}
    code = "print('in', flush=True); input(); raise SystemExit(7)"
    process = withlock("deploy", "--", *python(code), **settings)
    assert process.stdout.readline() == "in\n"
    assert AdvisoryLock.objects.for_name("deploy").get().state == "idle in transaction"
    process.communicate("\n", timeout=120)
    assert process.returncode == 7
    assert_no_locks()


def test_withlock_takes_a_number_as_a_lock_name():
    """lock(5) in Python uses the number 5 as the key."""
    with hold(5):
        process = withlock("5", "--skip", "--", *python("print('ran')"))
        assert process.communicate(timeout=120) == ("ran\n", "")


@pytest.mark.parametrize("settings", ["tests.settings", "tests.settings_transaction_scope"])
def test_ctrl_c_during_the_wait_ends_it_without_a_traceback(eventually, settings):
    """By the signal, as it ends ``flock``: so a shell knows that the user has interrupted the script."""
    with hold("deploy"):
        # Not by manage.py of this project, which itself says something about Ctrl-C.
        arguments = ("withlock", "deploy", "--", *python("print('ran')"))
        process = django(*arguments, DJANGO_SETTINGS_MODULE=settings)
        eventually(lambda: AdvisoryLock.objects.filter(waiters__gt=0).exists())
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120) == ("", "")
        assert process.returncode == -signal.SIGINT
        eventually(lambda: not AdvisoryLock.objects.filter(waiters__gt=0).exists())


@pytest.mark.parametrize("settings", ["tests.settings", "tests.settings_transaction_scope"])
def test_a_lost_lock_ends_the_command(eventually, settings):
    code = "print('in', flush=True); import time; time.sleep(600)"
    process = withlock("deploy", "--", *python(code), DJANGO_SETTINGS_MODULE=settings)
    assert process.stdout.readline() == "in\n"
    row = eventually(lambda: AdvisoryLock.objects.for_name("deploy").first())
    assert AdvisoryLock.objects.terminate(row.pid)
    _out, err = process.communicate(timeout=120)
    assert process.returncode == 70
    assert err.count("was lost") == 1


def test_a_command_that_ignores_sigterm_is_killed_after_the_lock_is_lost(monkeypatch):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('in', flush=True); time.sleep(600)"
    monkeypatch.setattr(withlock_command, "KILLED_AFTER", 0.1)
    with (
        subprocess.Popen(python(code), stdout=subprocess.PIPE) as child,
        pytest.raises(LockLost),
        lock("deploy") as handle,
    ):
        assert child.stdout.readline() == b"in\n"
        connection.connection.close()
        assert withlock_command.wait_while_held(handle, child) == 70
    assert child.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="Only Linux can end a process with its parent.")
def test_the_command_is_killed_if_withlock_is_killed():
    """Otherwise the command would continue without the lock, at the same time as the command of the next holder."""
    process = withlock("deploy", "--", *python("print('in', flush=True); import time; time.sleep(600)"))
    assert process.stdout.readline() == "in\n"
    process.kill()
    # The command has the other end of this pipe open until it ends.
    assert process.communicate(timeout=120)[0] == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("deploy",), "no command"),
        (("deploy", "--", "/no/such/program"), "No such file"),
        (("", "--", "true"), "empty"),
        (("deploy", "--database", "nope", "--", "true"), "DATABASES has no alias 'nope'. Its aliases: default"),
    ],
)
def test_withlock_reports_invalid_arguments_without_a_traceback(arguments, text):
    process = withlock(*arguments)
    _out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert text in err
    assert "Traceback" not in err
