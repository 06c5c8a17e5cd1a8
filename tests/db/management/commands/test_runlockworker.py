"""``manage.py runlockworker``: the arguments that it refuses, and those that it passes on to the worker."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_pglock.tasks.compat import BaseTaskBackend

OURS = "django_pglock.backend.PostgresBackend"
DUMMY = f"{BaseTaskBackend.__module__.removesuffix('base')}dummy.DummyBackend"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["mial"], "QUEUES has no 'mial'; it has default, mail"),
        (["mali*"], "QUEUES has no 'mali[*]'; it has default, mail"),
        (["--exclude", "mial"], "QUEUES has no 'mial'; it has default, mail"),
        (["--exclude", "mail", "--exclude", "d*"], "All queues of QUEUES are excluded: default, mail"),
        (["mail", "--exclude", "mail"], "No queue is left to serve"),
        (["mail=0"], "weight of queue 'mail' is '0'; use a whole number from 1 to 1000"),
        (["mail=2", "--order", "strict"], "'mail' is served in strict order"),
        (["--order", "random"], "invalid choice: 'random'"),
        (["--database", "nowhere"], "DATABASES has no alias 'nowhere'. Its aliases: default"),
        (["--threads", "0"], "1 to 1000"),
        (["--grace", "soon"], "'soon' is not a number of seconds"),
        (["--threads", "many"], "'many' is not a number from 1 to 1000"),
        (["--grace", "-1"], "0 or larger"),
        (["--drain", "--reload"], "cannot be combined with"),
        (["--processes", "2", "--reload"], "cannot be combined with"),
        (["--max-time", "60", "--reload"], "cannot be combined with"),
        (["--processes", "65"], "from 1 to 64"),
        (["--max-memory", "0"], "'0' is not a number of MiB above zero"),
        (["--max-tasks", "0"], "not a number from 1"),
        (["--probe-port", "65536"], "'65536' is not a port from 0 to 65535"),
        (
            ["--probe-port", "65535", "--processes", "3"],
            "need the ports 65535 to 65537 for probes, but the highest port is 65535",
        ),
        (["--probe-host", "127.0.0.1"], "The probes have an address, '127.0.0.1', but no port"),
        (["--heartbeat-file", ""], "The path of the heartbeat file is empty"),
        (["--heartbeat-file", "", "--processes", "2"], "The path of the heartbeat file is empty"),
    ],
)
@override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": ["default", "mail"]}})
def test_a_worker_that_would_idle_for_ever_is_refused_with_what_there_is(arguments, text):
    with pytest.raises(CommandError, match=text) as raised:
        call_command("runlockworker", *arguments)
    # By call_command(), Django's parser raises an error with the code 1. On a command line it exits with 2.
    assert raised.value.returncode == (1 if str(raised.value).startswith("Error: ") else 2)


@override_settings(TASKS={"default": {"BACKEND": OURS, "OPTIONS": {"database": "other"}}})
def test_a_database_without_tasks_is_refused():
    with pytest.raises(CommandError, match="No backend in TASKS stores its tasks in the database 'default'"):
        call_command("runlockworker", "--database", "default")


@pytest.mark.parametrize("command", [["runlockworker"], ["locktasks", "keda"]])
@pytest.mark.parametrize(
    ("databases", "text"),
    [
        ([], "No backend in TASKS stores its tasks in PostgreSQL. In one entry of TASKS, set BACKEND to"),
        (["other"], "DATABASES has no alias 'other'. Its aliases: default"),
        (
            ["other", "default", "other"],
            "The backends in TASKS use several databases: default, other. Choose one with --data",
        ),
    ],
)
def test_the_database_is_that_of_the_backend_if_there_is_just_one(command, databases, text):
    """In another database the command would find no task, and an autoscaler would never start a worker."""
    tasks = {"dummy": {"BACKEND": DUMMY}}
    for number, database in enumerate(databases):
        tasks[str(number)] = {"BACKEND": OURS, "OPTIONS": {"database": database}}
    with override_settings(TASKS=tasks), pytest.raises(CommandError, match=text):
        call_command(*command)


@override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": []}})
def test_the_worker_is_built_as_asked_for(monkeypatch):
    built = []

    class Recorder:
        left_behind = ()

        def __init__(self, **options):
            built.append(options)

        def run(self):
            return True

        def stop(self):
            pass

    monkeypatch.setattr("django_pglock.management.worker_process.Worker", Recorder)
    monkeypatch.setattr("django_pglock.management.worker_process.stop_at_signals", lambda worker: None)
    monkeypatch.setattr("django_pglock.management.worker_process.log_banner", lambda worker, build: None)
    queues = ["any=3", "thing*", "--exclude", "thing-1", "--exclude=x", "--order", "weighted"]
    signs = ["--probe-port", "9187", "--probe-host", "::", "--heartbeat-file", "alive"]
    call_command(
        "runlockworker",
        *queues,
        *signs,
        "--threads",
        "3",
        "--grace",
        "1.5",
        "--no-listen",
        "--no-reload",
        "--backend",
        "default",
    )
    [options] = built
    assert (options.pop("queues"), options.pop("exclude")) == (["any=3", "thing*"], ["thing-1", "x"])
    assert options == {
        "backend": "default",
        "order": "weighted",
        "threads": 3,
        "grace": 1.5,
        "listens": False,
        "using": "default",
        "drain": False,
        "max_tasks": None,
        "max_memory": None,
        "max_time": None,
        "probe_port": 9187,
        "probe_host": "::",
        "heartbeat_file": "alive",
    }


@override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": ["default", "mail-a", "mail-b"]}})
@pytest.mark.parametrize("arguments", [["mail*=2"], ["*"], ["--exclude", "mail*"], ["mail-a", "mail-b", "default"]])
def test_prefixes_are_known_by_the_queues_that_they_match(arguments, monkeypatch):
    built = []
    monkeypatch.setattr("django_pglock.management.commands.runlockworker.run_until_signal", built.append)
    call_command("runlockworker", *arguments, "--no-reload")
    assert len(built) == 1
