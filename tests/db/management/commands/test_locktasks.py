"""``manage.py locktasks``: its output, its questions, and the rows that it changes."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db.models.functions import Now

from django_pglock.conf import MOST_DAYS
from django_pglock.management.commands import locktasks as command
from django_pglock.models import Attempt, Queue, Task
from django_pglock.store.operate import VERBS
from django_pglock.store.release import DEPENDENCY_FAILED
from tests.db.store.test_prune import left, make
from tests.db.store.workers import beat
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def locktasks(*arguments, **options):
    call_command("locktasks", *map(str, arguments), stdout=(out := StringIO()), stderr=StringIO(), **options)
    return out.getvalue()


@pytest.fixture
def answer(monkeypatch):
    """Answer the questions, and return the list of questions that were asked."""
    asked = []

    def answer(text):
        def reply(prompt):
            asked.append(prompt)
            if text is None:
                raise EOFError
            return text

        monkeypatch.setattr("builtins.input", reply)
        return asked

    return answer


@pytest.fixture(autouse=True)
def nobody_there(answer):
    answer(None)


def status_of(*rows):
    return [Task.objects.get(pk=row.pk).status for row in rows]


def failed(**fields):
    return make("FAILED", days=0, **fields)


# status


def test_status_without_tasks_prints_a_sentence():
    assert locktasks("status") == "No task is waiting, running or failed.\n0 workers are alive.\n"
    assert json.loads(locktasks("status", "--json")) == {"queues": [], "workers": 0}


def test_status_counts_by_queue():
    make("READY", days=0, enqueued_at=Now() - timedelta(seconds=90), run_after=None)
    make("READY", days=0, enqueued_at=Now() - timedelta(seconds=90), run_after=Now() - timedelta(seconds=30))
    make("READY", days=0, fair_key="a", queue="fair", run_after=None)
    for status in ("BLOCKED", "SCHEDULED", "RUNNING", "FAILED", "SUCCESSFUL", "CANCELLED"):
        make(status, queue="mail")
    make("FAILED", queue="mail")
    Queue.objects.pause("night")
    beat("default", uuid4(), name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
    found = json.loads(locktasks("status", "--json"))
    assert found["workers"] == 1
    rows = {row["queue"]: row for row in found["queues"]}
    assert list(rows) == ["default", "fair", "mail", "night"]
    assert (rows["default"]["ready"], rows["fair"]["ready"]) == (2, 1)
    assert 90 <= rows["default"]["oldest_ready"] < 900
    assert rows["fair"]["oldest_ready"] < 60
    expected = {"ready": 0, "blocked": 1, "scheduled": 1, "running": 1, "failed": 2, "oldest_ready": None}
    assert {name: rows["mail"][name] for name in expected} == expected
    assert rows["night"]["paused_at"]
    assert rows["mail"]["paused_at"] is None
    table = locktasks("status").splitlines()
    assert table[0].split()[:3] == ["QUEUE", "READY", "BLOCKED"]
    assert table[3].split() == ["mail", "0", "1", "1", "1", "2", "-", "-"]
    assert "1 worker is alive." in table


def test_ready_tasks_without_a_worker_are_reported():
    make("READY", days=0, run_after=None)
    assert locktasks("status").splitlines()[-2:] == [
        "0 workers are alive.",
        "Tasks are ready, but no worker is alive. Start a worker: manage.py runlockworker",
    ]


def test_ready_tasks_that_no_living_worker_can_run_are_reported():
    about = {"name": "w", "hostname": "h", "pid": 1, "threads": 1, "is_stopping": False}
    beat("default", uuid4(), queues=["mail"], task_paths=["shop.tasks.known"], **about)
    make("READY", days=0, run_after=None, queue="mail", task_path="shop.tasks.renamed")
    make("READY", days=0, run_after=None, queue="film", task_path="shop.tasks.known")
    assert locktasks("status").splitlines()[-3:] == [
        "1 worker is alive.",
        "No worker knows shop.tasks.renamed, which ready tasks call. Was it renamed, or is its module not imported?",
        "No worker serves the queue film, which has ready tasks: manage.py runlockworker film",
    ]


# list and show


def test_list_shows_the_matching_tasks_newest_first():
    make("READY", days=9)
    rows = [failed(queue=queue, task_path=path) for queue, path in (("a", "x.one"), ("b", "x.two"), ("a", "y.two"))]

    def ids(*arguments):
        return [row["id"] for row in json.loads(locktasks("list", "--json", *arguments))]

    first, second, third = (row.pk for row in rows)
    assert ids("--status", "failed") == [third, second, first]
    assert ids("--queue", "a", "--status", "FAILED") == [third, first]
    assert ids("--queue", "a", "--queue", "b") == [third, second, first]
    assert ids("--task", "two") == [third, second]
    assert ids("--task", "x.two") == [second]
    assert ids("--task", "wo") == []
    assert len(ids("--older-than", "8.9")) == 1
    assert ids("--limit", "2") == [third, second]
    table = locktasks("list", "--status", "FAILED", "--limit", "1").splitlines()
    assert table[1].split()[:5] == [str(third), "FAILED", "a", "y.two", "0"]
    assert locktasks("list", "--queue", "nobody") == "No task matches.\n"


# The verbs


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_each_verb_is_a_subcommand_with_ids_or_filters(verb):
    """Which tasks a verb changes, and how, is tested in tests/db/store/test_operate.py."""
    value = ["--to", "other"] if verb.takes_queue else []
    row = make(min(verb.statuses))
    assert locktasks(verb.command, *value, "--all", "--dry-run") == f"{verb.message(verb.question, 1)}\n"
    assert locktasks(verb.command, *value, row.pk, row.pk + 1).splitlines() == [
        verb.message(verb.done, 1),
        verb.message(verb.unchanged, 1),
    ]
    with pytest.raises(CommandError, match="No task with these ids is in a state that allows this"):
        locktasks(verb.command, *value, row.pk + 1)
    assert locktasks(verb.command, *value, "--all", "--yes") == f"{verb.message(verb.done, 0)}\n"


def test_locktasks_with_filters_shows_the_number_of_tasks_and_asks(answer):
    mine, other = failed(queue="mail"), failed()
    asked = answer("n")
    with pytest.raises(CommandError, match="No task was changed"):
        locktasks("retry", "--queue", "mail")
    assert status_of(mine) == ["FAILED"]
    assert len(asked) == 1
    answer("y")
    assert locktasks("retry", "--queue", "mail") == "1 task would run again.\n1 task will run again.\n"
    assert status_of(mine, other) == ["READY", "FAILED"]


def test_without_a_terminal_the_command_requires_yes():
    row = failed()
    with pytest.raises(CommandError, match="give --yes"):
        locktasks("retry", "--all")
    assert status_of(row) == ["FAILED"]
    assert locktasks("retry", "--all", "--yes") == "1 task will run again.\n"


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        (["retry"], "one of these: ids, filters", 2),
        (["retry", "--yes"], "one of these: ids, filters", 2),
        (["cancel", "1", "--all"], "one of these: ids, filters", 2),
        (["cancel", "1", "--older-than", "0"], "one of these: ids, filters", 2),
        (["cancel", "--all", "--older-than", "0"], "one of these: ids, filters", 2),
        (["redrive"], "No failures are selected", 2),
        (["redrive", "--exception", "Refused", "--rate", "0"], "'0' is not a number from 0.001 to 5000", 1),
        (["move-to-queue", "--all", "--to", ""], "queue", 2),
        (["pause", "mail*"], "'mail\\*' is no queue", 2),
        (["resume", "mail*"], "'mail\\*' is no queue", 2),
        (["prune", "--status", "RUNNING"], "RUNNING", 2),
        (["prune", "--status", "FAILED"], "keeps FAILED tasks forever", 2),
        (["status", "--database", "moon"], "DATABASES has no alias 'moon'. Its aliases: default", 2),
        (["retry", "999999999"], "No task with these ids", 1),
        (["resume", "mail"], "Queue 'mail' is not paused", 1),
        # By call_command(), Django's parser raises an error with the code 1. On a command line it exits with 2.
        (["retry", str(2**63)], "argument ID: '9223372036854775808' is not a number", 1),
        (["retry", "--status", "LOST"], "invalid choice: 'LOST'", 1),
        (["retry", "--older-than", str(MOST_DAYS + 1)], "'36526' is not a number from 0 to 36525", 1),
        (["list", "--limit", "0"], "'0' is not a number", 1),
        ([], "SUBCOMMAND", 1),
    ],
)
def test_invalid_arguments_raise_a_command_error_with_an_exit_code(arguments, text, code):
    with pytest.raises(CommandError, match=text) as raised:
        locktasks(*arguments)
    assert raised.value.returncode == code
    assert not Queue.objects.exists()


def test_counts_in_questions_stop(monkeypatch):
    monkeypatch.setattr(command, "MOST_COUNTED", 2)
    rows = [failed() for _ in range(3)]
    assert locktasks("retry", "--all", "--dry-run") == "2+ tasks would run again.\n"
    assert status_of(*rows) == ["FAILED"] * 3


# prune


def test_prune_deletes_by_the_setting_or_by_its_options():
    make(), make("CANCELLED", days=8)
    kept = make("FAILED", days=20)
    assert locktasks("prune", "--dry-run").startswith("1 finished task would be deleted")
    assert len(left()) == 3
    assert locktasks("prune") == "1 task was deleted.\n"
    assert locktasks("prune", "--older-than", "7") == "1 task was deleted.\n"
    assert left() == {kept.pk}
    assert locktasks("prune", "--older-than", "21", "--status", "FAILED") == "0 tasks were deleted.\n"
    assert locktasks("prune", "--older-than", "19", "--status", "failed") == "1 task was deleted.\n"


def test_a_retry_takes_what_was_cancelled_because_of_the_task_unless_told_otherwise():
    def fail():
        Task.objects.all().delete()
        part = make("FAILED", days=0)
        final = make("CANCELLED", days=0, meta={"after": [part.pk]})
        Attempt.objects.create(
            task=final,
            number=0,
            started_at=Now(),
            finished_at=Now(),
            outcome="FAILED",
            exception_path=DEPENDENCY_FAILED,
            cause=part.pk,
        )
        return part.pk

    said = locktasks("retry", fail(), "--dry-run")
    assert said == "1 task would run again.\nAnd 1 task that was cancelled because of it.\n"
    assert locktasks("retry", fail()) == "2 tasks will run again.\n"
    assert locktasks("retry", fail(), "--no-dependants") == "1 task will run again.\n"


def test_a_cancel_leaves_the_parts_unless_told_otherwise():
    for option, statuses in (("--parts", ["CANCELLED"] * 2), ("--no-parts", ["READY", "CANCELLED"])):
        Task.objects.all().delete()
        part = tasks.nothing.enqueue()
        final = tasks.nothing.using(after=[part]).enqueue()
        locktasks("cancel", final.id, option)
        assert list(Task.objects.order_by("pk").values_list("status", flat=True)) == statuses
