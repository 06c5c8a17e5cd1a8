"""``manage.py withlock``: exit codes, signals, busy and lost locks."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from django.db import connection

from django_pglock import LockLost, lock
from django_pglock.management.commands import withlock as withlock_command
from django_pglock.models import AdvisoryLock
from django_pglock.testing import assert_locked, assert_no_locks, assert_not_locked, hold
from qa.acceptance.management.commands.processes import django, manage

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
    assert "Lock 'deploy' has another holder" in err


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


def test_the_command_gets_the_open_files_of_the_shell():
    """For example ``withlock deploy -- ./load.sh <(make_data)`` in bash."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    with lock("deploy"):
        withlock_command.start(python(f"import os; os.write({writer}, b'data')")).wait()
    os.close(writer)
    assert os.read(reader, 9) == b"data"
    os.close(reader)


COUNTS = """
import signal, sys, time
seen = []
def note(*_):
    seen.append(1)
    print("got", flush=True)
signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(len(seen)))
print("in", flush=True)
time.sleep(600)
"""


def forward_ctrl_c():
    """Pass signals on to a command until the first Ctrl-C. Return how many of them the command has got."""
    child = subprocess.Popen(python(COUNTS), stdout=subprocess.PIPE)
    child.stdout.readline()
    withlock_command.pass_signals_on(child)
    forward, forwarded = signal.getsignal(signal.SIGINT), []

    def note(number, frame):
        child.stdout.readline()
        forward(number, frame)
        forwarded.append(number)

    signal.signal(signal.SIGINT, note)
    os.write(1, b"ready")
    while not forwarded:
        time.sleep(0.01)
    child.terminate()
    return child.wait()


def test_the_command_gets_ctrl_c_once_whatever_its_standard_input_is():
    """The terminal sends SIGINT to all processes of a pipeline, so also to the command."""
    process, terminal = pty.fork()
    if process == 0:
        code = 99
        try:
            sys.stdin = None  # as Python has it if the standard input is closed
            code = forward_ctrl_c()
        finally:
            os._exit(code)
    while b"ready" not in os.read(terminal, 1000):
        pass
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    os.close(terminal)


def test_a_signal_after_the_end_of_the_command_does_nothing():
    before = {number: signal.getsignal(number) for number in (1, 2, 10, 12, 15)}
    with subprocess.Popen(python("pass")) as child:
        child.wait()
        withlock_command.pass_signals_on(child)
        signal.raise_signal(signal.SIGINT)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        (("deploy",), "no command", 2),
        (("deploy", "--", "/no/such/program"), "No such file", 1),
        (("", "--", "true"), "empty", 2),
        (("deploy", "--database", "nope", "--", "true"), "DATABASES has no alias 'nope'. Its aliases: default", 2),
    ],
)
def test_withlock_reports_invalid_arguments_without_a_traceback(arguments, text, code):
    process = withlock(*arguments)
    _out, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert text in err
    assert "Traceback" not in err
