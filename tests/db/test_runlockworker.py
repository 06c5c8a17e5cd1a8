"""The door of the worker: what it refuses, and what it passes on."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

OURS = "django_pglock.backend.PostgresBackend"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["mial"], "QUEUES has no 'mial'; it has default, mail"),
        (["--database", "nowhere"], "DATABASES has no 'nowhere'; it has default"),
        (["--threads", "0"], "1 to 1000"),
        (["--grace", "soon"], "'soon' are no seconds"),
        (["--threads", "many"], "'many' is no number from 1 to 1000"),
        (["--grace", "-1"], "zero or more"),
    ],
)
@override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": ["default", "mail"]}})
def test_a_worker_that_would_idle_for_ever_is_refused_with_what_there_is(arguments, text):
    with pytest.raises(CommandError, match=text):
        call_command("runlockworker", *arguments)


@override_settings(TASKS={"default": {"BACKEND": OURS, "OPTIONS": {"database": "other"}}})
def test_a_database_without_tasks_is_refused():
    with pytest.raises(CommandError, match="No backend of TASKS"):
        call_command("runlockworker")


@override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": []}})
def test_the_worker_is_built_as_asked_for(monkeypatch):
    built = []

    class Recorder:
        def __init__(self, **options):
            built.append(options)

        def run(self):
            pass

        def stop(self):
            pass

    monkeypatch.setattr("django_pglock.management.commands.runlockworker.Worker", Recorder)
    monkeypatch.setattr("django_pglock.management.commands.runlockworker.stop_at_signals", lambda worker: None)
    call_command("runlockworker", "anything", "--threads", "3", "--grace", "1.5", "--no-listen", "--no-reload")
    assert built == [{"queues": ["anything"], "threads": 3, "grace": 1.5, "listens": False, "using": "default"}]
