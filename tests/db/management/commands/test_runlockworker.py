"""``manage.py runlockworker``: the arguments that it refuses, and how it ends."""

from __future__ import annotations

import sys
from io import StringIO
from types import SimpleNamespace

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_pglock.management.commands import runlockworker
from django_pglock.worker import Worker

OURS = "django_pglock.backend.PostgresBackend"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["mial"], "QUEUES has no 'mial'; it has default, mail"),
        (["mali*"], "QUEUES has no 'mali[*]'; it has default, mail"),
        (["--exclude", "mial"], "QUEUES has no 'mial'; it has default, mail"),
        (["--exclude", "mail", "--exclude", "d*"], "All queues of QUEUES are excluded: default, mail"),
        (["mail", "--exclude", "mail"], "No queue is left to serve"),
        (["mail=0"], "weight of queue 'mail' is '0'; use a whole number from 1 to 1000"),
        (["--database", "nowhere"], "DATABASES has no alias 'nowhere'. Its aliases: default"),
        (["--threads", "0"], "1 to 1000"),
        (["--grace", "soon"], "'soon' is not a number from 0"),
        (["--threads", "many"], "'many' is not a number from 1 to 1000"),
        (["--grace", "-1"], "is not a number from 0"),
        (["--drain", "--reload"], "cannot be combined with"),
        (["--processes", "65"], "from 1 to 64"),
        (["--max-memory", "0"], "'0' is not a number from 1"),
        (["--max-tasks", "0"], "not a number from 1"),
        (["--probe-port", "65536"], "'65536' is not a port from 0 to 65535"),
        (["--probe-port", "127.0.0.1"], "'127.0.0.1' is not a port from 0 to 65535, and not ADDRESS:PORT"),
    ],
)
@override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": ["default", "mail"]}})
def test_a_worker_that_would_idle_for_ever_is_refused_with_what_there_is(arguments, text):
    with pytest.raises(CommandError, match=text) as raised:
        call_command("runlockworker", *arguments)
    # By call_command(), Django's parser raises an error with the code 1. On a command line it exits with 2.
    assert raised.value.returncode == (1 if str(raised.value).startswith("Error: ") else 2)


@override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": ["default", "mail-a", "mail-b"]}})
@pytest.mark.parametrize("arguments", [["mail*=2"], ["*"], ["--exclude", "mail*"], ["mail-a", "mail-b", "default"]])
def test_prefixes_are_known_by_the_queues_that_they_match(arguments, monkeypatch):
    served = []
    monkeypatch.setattr(Worker, "run", lambda self: served.append(self.queues.given) or True)
    call_command("runlockworker", *arguments, "--no-reload")
    assert len(served) == 1


@override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": []}})
@pytest.mark.parametrize(
    ("is_ok", "left_behind", "end", "code"),
    [(False, [], SystemExit, 1), (False, ["a task"], CommandError, 75)],
)
def test_the_exit_code_tells_a_service_manager_how_the_worker_has_ended(monkeypatch, is_ok, left_behind, end, code):
    def run(worker):
        worker.crews.append(SimpleNamespace(left_behind=left_behind))
        return is_ok

    monkeypatch.setattr(Worker, "run", run)
    with pytest.raises(end) as raised:
        call_command("runlockworker", "--no-reload")
    assert vars(raised.value).get("returncode", getattr(raised.value, "code", None)) == code


@override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": []}})
def test_a_worker_whose_code_has_changed_starts_again_with_its_command_line(monkeypatch):
    def run(worker):
        worker.code_has_changed = worker.reloads
        return True

    started = []
    monkeypatch.setattr(Worker, "run", run)
    monkeypatch.setattr(runlockworker.os, "execv", lambda *command: started.append(command))
    call_command("runlockworker", "--no-reload")
    call_command("runlockworker")
    assert started == [], "DEBUG is off"
    call_command("runlockworker", "--reload")
    [(program, command)] = started
    assert program == command[0] == sys.executable


def test_an_interrupt_before_the_worker_runs_is_one_sentence(monkeypatch):
    """Such as in the system checks, which import the project's URLs."""
    command = runlockworker.Command(stderr=StringIO())

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "check", interrupt)
    with pytest.raises(SystemExit) as ended:
        command.run_from_argv(["manage.py", "runlockworker", "--no-reload"])
    assert (ended.value.code, command.stderr._out.getvalue()) == (130, "Interrupted. The worker had not started.\n")
