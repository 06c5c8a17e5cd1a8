"""The selection of tasks on a command line."""

from __future__ import annotations

import pytest
from django.core.management import call_command

from tests.db.management.commands.test_locktasks import failed, locktasks, status_of
from tests.db.store.test_prune import make

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--status", "CANCELLED"], ["FAILED", "FAILED", "READY", "FAILED"]),
        (["--task", "other"], ["READY", "FAILED", "CANCELLED", "FAILED"]),
        (["--older-than", "5"], ["FAILED", "FAILED", "CANCELLED", "READY"]),
        (["--all"], ["READY", "READY", "READY", "READY"]),
    ],
)
def test_filters_of_locktasks_select_the_tasks(filters, expected):
    rows = [failed(task_path="x.other"), failed(), make("CANCELLED", days=0), make("FAILED", days=6)]
    locktasks("retry", "--yes", *filters)
    assert status_of(*rows) == expected


@pytest.mark.parametrize("subcommand", [["list"], ["stats"], ["cancel", "--yes"]])
def test_a_filter_with_a_name_that_nothing_has_is_doubted(subcommand, settings, capsys):
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["default", "mail"]}}
    call_command("locktasks", *subcommand, "--queue", "mial", "--task", "ecko", "--task", "tests.sample.tasks.echo")
    assert capsys.readouterr().err == (
        "No backend in TASKS lists the queue 'mial' in QUEUES, so no task may be in it.\n"
        "This process knows no task function 'ecko'.\n"
    )
    call_command("locktasks", "keda", "--queue", "mial")
    answer = capsys.readouterr()
    assert (answer.out, "'mial'" in answer.err) == ("0\n", True)
