"""``manage.py runlockworker``: the arguments that it refuses."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

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
        (["--grace", "soon"], "'soon' is not a number of seconds"),
        (["--threads", "many"], "'many' is not a number from 1 to 1000"),
        (["--grace", "-1"], "0 or larger"),
        (["--drain", "--reload"], "cannot be combined with"),
        (["--processes", "2", "--reload"], "cannot be combined with"),
        (["--max-memory", "60", "--reload"], "cannot be combined with"),
        (["--processes", "65"], "from 1 to 64"),
        (["--max-memory", "0"], "'0' is not a number of MiB above zero"),
        (["--max-tasks", "0"], "not a number from 1"),
        (["--probe-port", "65536"], "'65536' is not a port from 0 to 65535"),
        (
            ["--probe-port", "65535", "--processes", "3"],
            "need the ports 65535 to 65537 for probes, but the highest port is 65535",
        ),
        (["--probe-port", "127.0.0.1"], "'127.0.0.1' is not a port from 0 to 65535, and not ADDRESS:PORT"),
        (["--probe-port", "127.0.0.1:65535", "--processes", "2"], "need the ports 65535 to 65536"),
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
    built = []
    monkeypatch.setattr("django_pglock.management.commands.runlockworker.run_until_signal", built.append)
    call_command("runlockworker", *arguments, "--no-reload")
    assert len(built) == 1
