"""The arguments of ``runlockworker``, and the options of the worker that they become."""

from __future__ import annotations

import sys
from inspect import signature

from django.core.management import call_command
from django.core.management.base import CommandParser
from django.test import override_settings

from django_pglock.management.worker_arguments import add_worker_arguments
from django_pglock.worker import Worker
from django_pglock.worker.queues import Queues

OURS = "django_pglock.backend.PostgresBackend"


@override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": []}})
def test_the_worker_is_built_as_asked_for(monkeypatch):
    built = []

    class Recorder:
        left_behind = ()
        code_has_changed = False

        def __init__(self, **options):
            built.append(options)
            self.queues = Queues(options["queues"], exclude=options["exclude"])

        def run(self):
            return True

    monkeypatch.setattr("django_pglock.management.commands.runlockworker.Worker", Recorder)
    queues = ["any=3", "thing*", "--exclude", "thing-1", "--exclude=x"]
    signs = ["--probe-port", "[::]:9187"]
    call_command(
        "runlockworker",
        *queues,
        *signs,
        "--threads",
        "3",
        "--grace",
        "1.5",
        "--no-reload",
        "--backend",
        "default",
        "--processes",
        "2",
    )
    [options] = built
    assert (options.pop("queues"), options.pop("exclude")) == (["any=3", "thing*"], ["thing-1", "x"])
    assert options.pop("command")()[0] == sys.executable
    assert options == {
        "backend": "default",
        "threads": 3,
        "grace": 1.5,
        "using": ["default"],
        "processes": 2,
        "reloads": False,
        "drain": False,
        "max_tasks": None,
        "max_memory": None,
        "probe_port": "[::]:9187",
    }


def test_each_option_of_a_worker_is_an_argument_with_the_same_default():
    parser = CommandParser()
    add_worker_arguments(parser)
    arguments = vars(parser.parse_args([]))
    options = {name: each.default for name, each in signature(Worker).parameters.items()}
    assert options.keys() - arguments.keys() == {"using", "command", "reloads"}
    assert arguments.keys() - options.keys() == {"database", "reload"}
    shared = options.keys() & arguments.keys()
    # Lists of queues are empty.
    assert {name: arguments[name] or None for name in shared} == {name: options[name] or None for name in shared}
