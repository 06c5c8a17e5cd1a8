"""The selection of tasks on a command line."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest
from django.core.management import call_command

from django_pglock.conf import MOST_DAYS
from django_pglock.management.arguments import WrongArguments
from django_pglock.management.choosing import chosen, days, plain_text, task_id
from django_pglock.models import Task
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


NOTHING = {"ids": [], "queue": None, "task": None, "status": None, "older_than": None, "all": False}


def test_an_age_of_zero_days_is_a_filter():
    failed()
    assert chosen(Task.objects.all(), {**NOTHING, "older_than": 0.0}).count() == 1
    for wrong in ({"ids": [1]}, {"all": True}):
        with pytest.raises(WrongArguments, match="not both"):
            chosen(Task.objects.all(), {**NOTHING, "older_than": 0.0, **wrong})


def test_a_name_without_its_module_is_a_whole_name():
    rows = [failed(task_path=path) for path in ("shop.mail.send", "shop.mail.resend", "send", "shop.send.mail")]
    found = chosen(Task.objects.all(), {**NOTHING, "task": ["send"]})
    assert set(found) == {rows[0], rows[2]}


@pytest.mark.parametrize(("text", "number"), [("0", 0.0), ("0.5", 0.5), (f"{MOST_DAYS}", MOST_DAYS)])
def test_a_number_of_days_is_one_that_the_server_can_subtract(text, number):
    assert days(text) == number
    for wrong in (f"{MOST_DAYS + 1}", "-0.1", "inf", "nan", "", "1 day"):
        with pytest.raises(ArgumentTypeError, match="is not a number of days"):
            days(wrong)


@pytest.mark.parametrize("text", ["-1", "1.0", "", "x", "²", f"{2**63}", "9" * 5000])
def test_a_text_that_no_task_has_as_id_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="is not the id of a task"):
        task_id(text)
    assert task_id(f"{2**63 - 1}") == 2**63 - 1


def test_a_name_is_refused_only_if_the_terminal_has_sent_bytes_that_are_no_text():
    for name in ("mail", "ünï 👩", "a\x1b[2J", ""):
        assert plain_text(name) == name
    with pytest.raises(ArgumentTypeError, match="is not valid text"):
        plain_text(b"a\xff".decode("utf-8", "surrogateescape"))


@pytest.mark.parametrize("subcommand", [["list"], ["stats"], ["cancel", "--yes"]])
def test_a_filter_with_a_name_that_nothing_has_is_doubted(subcommand, settings, capsys):
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["default", "mail"]}}
    call_command("locktasks", *subcommand, "--queue", "mial", "--task", "ecko", "--task", "tests.sample.tasks.echo")
    assert capsys.readouterr().err == (
        "No backend in TASKS lists the queue 'mial' in QUEUES, so no task may be in it.\n"
        "This process knows no task function 'ecko'. Did you mean 'echo'?\n"
    )
    call_command("locktasks", "keda", "--queue", "mial")
    answer = capsys.readouterr()
    assert (answer.out, "'mial'" in answer.err) == ("0\n", True)
