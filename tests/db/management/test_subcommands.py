"""The subcommands of ``locktasks``: what they choose, ask, change and print."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from io import StringIO
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db.models.functions import Now

from django_pglock import task
from django_pglock.management.commands import locktasks as command
from django_pglock.management.tables import QUEUES, lines_of_fields
from django_pglock.management.terminal import table
from django_pglock.models import Attempt, Event, Queue, Schedule, Task
from django_pglock.store.count import COUNTED
from django_pglock.store.numbers import Counts, add_numbers, bucket_of
from django_pglock.store.requests_to_worker import answer_stack, request_stack
from django_pglock.testing import run_tasks
from tests.db.management.commands.test_locktasks import answer as answer  # a fixture
from tests.db.management.commands.test_locktasks import failed, locktasks
from tests.db.store.schedules import of_code
from tests.db.store.test_failures import PATH, fail
from tests.db.store.test_prune import make
from tests.sample import scheduled, step_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("subcommand", [["list"], ["stats"], ["cancel", "--yes"]])
def test_a_filter_with_a_name_that_nothing_has_is_doubted(subcommand, settings, capsys):
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["default", "mail"]}}
    call_command("locktasks", *subcommand, "--queue", "mial", "--task", "ecko", "--task", "tests.sample.tasks.echo")
    assert capsys.readouterr().err == (
        "No backend in TASKS lists the queue 'mial' in QUEUES, so no task may be in it.\n"
        "This process knows no task function 'ecko'.\n"
    )


# ``locktasks pause`` and ``locktasks resume``.


def test_pause_and_resume():
    assert locktasks("pause", "mail", "--reason", "provider is down") == "Queue 'mail' was paused.\n"
    assert "is paused already" in locktasks("pause", "mail")
    row = Queue.objects.get()
    assert row.paused_at
    assert row.paused_by
    assert row.reason == "provider is down"
    assert locktasks("resume", "mail") == "Queue 'mail' was resumed.\n"
    row.refresh_from_db()
    assert row.paused_at is None


def test_pausing_a_queue_that_no_backend_lists_prints_a_warning(settings, capsys):
    """A mistyped name pauses the wrong queue."""
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["default", "mail"]}}
    call_command("locktasks", "pause", "mial")
    assert capsys.readouterr() == (
        "Queue 'mial' was paused.\n",
        "No backend in TASKS lists the queue 'mial' in QUEUES, so no task may be in it.\n",
    )
    call_command("locktasks", "pause", "mail")
    assert capsys.readouterr().err == ""


def test_a_container_without_users_can_pause(monkeypatch):
    def refuse():
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr("getpass.getuser", refuse)
    locktasks("pause", "mail")
    assert Queue.objects.get().paused_by == "locktasks"


# What ``locktasks schedules`` prints.


def test_schedules_are_shown_with_the_status_of_their_last_task():
    assert "There is no schedule" in locktasks("schedules")
    row = make("FAILED", days=0)
    dates = {"expression": "every 60 s", "next_at": "2030-01-01T00:00:00Z"}
    of_code("a.fetch", last_task=row.pk, last_at="2029-12-31T00:00:00Z", **dates)
    of_code("b.gone\x1b", last_task=row.pk + 1, is_enabled=False, **dates)
    head, fetch, gone = locktasks("schedules").splitlines()
    assert head.split()[:2] == ["NAME", "TASK"]
    assert fetch.split() == [
        *(
            "a.fetch",
            "in",
            "the",
            "code",
            "every",
            "60",
            "s",
            "2030-01-01",
            "00:00:00+0000",
            "2029-12-31",
            "00:00:00+0000",
        ),
        *(str(row.pk), "FAILED"),
    ]
    assert gone.split() == ["b.gone?", "in", "the", "code", "every", "60", "s", "disabled", "-", str(row.pk + 1), "-"]
    first, second = json.loads(locktasks("schedules", "--json"))
    assert (first["task_path"], first["last_status"], second["last_status"]) == ("a.fetch", "FAILED", None)


@pytest.mark.usefixtures("own_registry")
def test_schedules_of_people_are_shown_with_their_function_and_without_hidden_arguments():
    path = task(redact=["number"])(scheduled.with_argument).module_path
    Schedule.objects.create(name="mine", task_path=path, args=["s3cret"], expression="every 1 h")
    assert locktasks("schedules").splitlines()[1].split()[:2] == ["mine", path]
    [row] = json.loads(locktasks("schedules", "--json"))
    assert (row["args"], row["expression"]) == (["[redacted]"], "every 1 h")


# The work of ``locktasks stack``: a sentence for each reason for which there is no stack.


@pytest.fixture
def answered(mine, monkeypatch):
    """The worker answers at once, with this text."""

    def answer(text):
        def request(using, task):
            assert request_stack(using, task)
            answer_stack(using, task, mine.attempt, mine.worker, text)
            return True

        monkeypatch.setattr(command, "request_stack", request)
        return locktasks("stack", mine.id)

    return answer


def test_control_characters_of_a_stack_are_not_printed(answered):
    assert answered('File "a.py", line 1\n  \x1b[2J\n') == 'File "a.py", line 1\n  ?[2J\n'


def test_an_empty_stack_says_that_the_function_does_not_run(answered, mine):
    with pytest.raises(CommandError, match=f"The function of task {mine.id} does not run"):
        answered("")


def test_a_worker_that_does_not_answer_in_time_is_reported(mine, monkeypatch):
    monkeypatch.setattr(command, "STACK_TIMEOUT", 0.0)
    with pytest.raises(CommandError, match="The worker has not answered"):
        locktasks("stack", mine.id)


def test_a_task_that_waits_and_one_that_does_not_exist_have_different_sentences():
    waiting = int(tasks.nothing.enqueue().id)
    for number, text in ((waiting, f"Task {waiting} is not running"), (waiting + 1, f"There is no task {waiting + 1}")):
        with pytest.raises(CommandError, match=text):
            locktasks("stack", number)


# How ``locktasks`` prints tasks and queues.


def test_show_prints_everything_with_tracebacks_and_escapes_control_characters():
    row = failed(args=["\x1b[2J"], queue="ma\x1bil", log="one\x1b\ntwo")
    Attempt.objects.create(
        task=row, number=1, worker=uuid4(), started_at=Now(), finished_at=Now(), outcome="FAILED",
        exception_path="builtins.ValueError", traceback="Traceback\n  line \x1b[31m",
    )  # fmt: skip
    text = locktasks("show", row.pk)
    assert "builtins.ValueError" in text
    assert "    Traceback\n      line ?[31m" in text
    assert "log:\n    one?\n    two\n" in text
    assert "\x1b" not in text
    found = json.loads(locktasks("show", row.pk, "--json"))
    assert (found["id"], found["failures"][0]["number"]) == (row.pk, 1)
    with pytest.raises(CommandError, match=f"There is no task {row.pk + 1}"):
        locktasks("show", row.pk + 1)


def test_a_count_that_was_stopped_has_a_plus_sign():
    row = {**dict.fromkeys(map(str.lower, COUNTED), 0), "queue": "ma\x1bil", "failed": 10_000, "at_least": ["failed"]}
    lines = table(QUEUES, [{**row, "oldest_ready": 75.0, "paused_at": None}]).splitlines()
    assert lines[1].split() == ["ma?il", "0", "0", "0", "0", "10000+", "75", "s", "-"]


def test_a_field_is_one_line_whatever_it_has():
    fields = {"queue": "a\nb", "args": ["\x1b", "é"], "retries": 0, "result": None}
    lines = list(lines_of_fields(fields))
    assert [line.partition(":")[2].strip() for line in lines] == ["a?b", '["\\u001b", "é"]', "0"]


# ``manage.py locktasks failures`` and ``redrive``.


@pytest.fixture
def two_groups():
    """Two groups: two tasks refused by the bank, and a task of another function."""
    return [fail(fingerprint=7), fail(fingerprint=7), fail("shop.Closed", fingerprint=8, task_path="shop.tasks.ship")]


def statuses(rows):
    return [Task.objects.get(pk=row.pk).status for row in rows]


def test_groups_are_a_table(two_groups):
    head, *lines = locktasks("failures").splitlines()
    assert head.split() == ["FINGERPRINT", "FAILED", "LAST", "TASK", "EXCEPTION", "PLACE"]
    first, second = sorted(lines)
    assert first.split()[:2] == ["7", "2"]
    assert first.split()[5:] == [PATH, "bank.Refused", "bank.py:88"]
    assert second.split()[0] == "8"
    Task.objects.all().delete()
    assert locktasks("failures") == "No task has failed.\n"


def test_groups_are_json(two_groups):
    groups = {each["fingerprint"]: each for each in json.loads(locktasks("failures", "--json"))}
    assert (groups[7]["count"], groups[7]["newest"], groups[7]["message"]) == (2, two_groups[1].pk, "order 7")
    assert len(groups[8]["by_hour"]) == 24


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--fingerprint", 7], [7]),
        (["--fingerprint", 7, "--fingerprint", 8], [7, 8]),
        (["--task", "shop.tasks.ship"], [8]),
        (["--task", "ship"], [8]),
        (["--exception", "bank.Refused"], [7]),
        (["--exception", "Refused"], [7]),
        (["--exception", "Refused", "--task", "ship"], []),
    ],
)
def test_options_select_groups(two_groups, options, found):
    assert sorted(each["fingerprint"] for each in json.loads(locktasks("failures", "--json", *options))) == found


def test_a_group_is_retried_at_once(two_groups):
    said = locktasks("redrive", "--exception", "Refused", "--yes")
    assert said == "2 tasks will run again.\n"
    assert statuses(two_groups) == ["READY", "READY", "FAILED"]


def test_a_redrive_asks_first_and_may_be_a_dry_run(two_groups, answer):
    assert locktasks("redrive", "--fingerprint", 8, "--dry-run") == "1 task would run again.\n"
    asked = answer("n")
    with pytest.raises(CommandError, match="No task was changed"):
        locktasks("redrive", "--fingerprint", 8, "--rate", 5)
    assert asked == ["Continue? [y/N] "]
    assert statuses(two_groups) == ["FAILED"] * 3
    answer("y")
    locktasks("redrive", "--fingerprint", 8)
    assert statuses(two_groups) == ["FAILED", "FAILED", "READY"]
    assert locktasks("redrive", "--fingerprint", 8) == "0 tasks would run again.\n", "nothing to ask about"


def test_a_redrive_at_a_rate_is_run_by_a_task(two_groups):
    said = locktasks("redrive", "--exception", "Refused", "--rate", 2.5, "--yes")
    made = Task.objects.get(status="READY")
    assert made.kwargs == {"fingerprint": 7, "rate": 2.5, "with_related": True}
    assert f"Task {made.pk} retries the failures of group 7. To stop it: manage.py locktasks cancel {made.pk}" in said
    assert statuses(two_groups) == ["FAILED"] * 3
    again = locktasks("redrive", "--fingerprint", 7, "--rate", 9, "--yes")
    assert f"Task {made.pk} retries the failures of group 7 already." in again
    locktasks("cancel", made.pk)
    assert Task.objects.get(pk=made.pk).status == "CANCELLED"


# ``manage.py locktasks stats``: a table and JSON of what has ended lately.


def stats(*arguments):
    call_command("locktasks", "stats", *arguments, stdout=(out := StringIO()))
    return out.getvalue()


@pytest.fixture
def history():
    now = int(datetime.now(timezone.utc).timestamp() // 60 * 60)
    # The present minute, and two hours before.
    sent, charged, late = Counts(succeeded=118, failed=1, lost=1), Counts(retried=6), Counts(succeeded=1)
    sent.wait[bucket_of(0.002)] = sent.run[bucket_of(0.5)] = 120
    charged.run[bucket_of(90)] = 6
    add_numbers("default", {(now, "mail", "app.send"): sent, (now, "mail", "app.charge"): charged})
    add_numbers("default", {(now - 7200, "bulk", "app.send"): late})


def test_stats_prints_a_line_for_each_function(history):
    head, *lines = [line.split() for line in stats().splitlines()]
    assert head[:3] == ["QUEUE", "TASK", "PER"]
    assert [line[:7] for line in lines] == [
        ["mail", "app.send", "2.0", "118", "1", "0", "1"],
        ["mail", "app.charge", "0.1", "0", "0", "6", "0"],
    ]
    assert lines[0][7:9] == ["0.002", "s"]
    assert lines[1][7:9] == ["-", "-"]
    assert float(lines[1][-2]) == pytest.approx(90, rel=0.42)


def test_json_has_seconds(history):
    [sent, charged] = json.loads(stats("--json"))
    assert (sent["queue"], sent["task_path"], sent["succeeded"], sent["per_minute"]) == ("mail", "app.send", 118, 2.0)
    assert sent["run_p95"] == pytest.approx(0.5, rel=0.42)
    assert (charged["retried"], charged["wait_p50"]) == (6, None)


def test_stats_filters_by_task_and_queue_and_adds_up_by_queue(history):
    def shown(*arguments):
        found = json.loads(stats("--json", *arguments))
        return [(each["queue"], each["task_path"], each["succeeded"] + each["retried"]) for each in found]

    assert shown("--task", "charge", "--task", "end") == [("mail", "app.charge", 6)], "not those that end so"
    assert shown("--task", "app.send", "--hours", "24") == [("mail", "app.send", 118), ("bulk", "app.send", 1)]
    assert shown("--queue", "bulk", "--hours", "3") == [("bulk", "app.send", 1)]
    assert shown("--queue", "unknown") == []


def test_stats_without_ended_attempts_prints_a_sentence():
    assert stats() == "No attempt has ended in this time. Workers write their counts once a minute.\n"


# Steps and events


def test_show_has_the_steps_of_a_task_as_a_table():
    result = step_tasks.order.enqueue(7)
    run_tasks(until="due")
    said = locktasks("show", result.id)
    assert "why_it_waits:        This task sleeps until 20" in said
    assert re.search(r"^NUMBER  STEP    KIND   ATTEMPT  SINCE    TOOK  RESULT OR FAILURE$", said, re.MULTILINE)
    assert re.search(r'^1       charge  STEP   1        \d s ago  0 s   {"name": "charge"}$', said, re.MULTILINE)
    steps = json.loads(locktasks("show", result.id, "--json"))["steps"]
    assert [(each["name"], each["kind"], each["result"]) for each in steps] == [
        ("charge", "STEP", {"name": "charge"}),
        ("book", "STEP", {"name": "book"}),
        ("night", "SLEEP", None),
    ]


def test_emit_continues_the_tasks_that_wait_and_changes_no_event_that_is_there():
    result = step_tasks.aorder.enqueue(7)
    run_tasks(until="due")
    assert locktasks("list", "--suspended", "--json").count('"id"') == 1
    assert locktasks("emit", "packed:7", '{"weight": 3}') == "Event 'packed:7' was emitted.\n"
    assert locktasks("emit", "packed:7", "4") == "Event 'packed:7' is there already, so nothing was changed.\n"
    assert locktasks("list", "--suspended") == "No task matches.\n"
    run_tasks(until="due")
    assert Task.objects.get(pk=result.id).result[1] == {"weight": 3}
    locktasks("emit", "nothing")
    assert Event.objects.get(pk="nothing").payload is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("a", "packed"), "'packed' is not JSON: .*two kinds of quotes"), (("a" * 201,), "200"), (("",), "name")],
)
def test_an_event_that_cannot_be_emitted_is_refused_with_the_reason(arguments, text):
    with pytest.raises(CommandError, match=text):
        locktasks("emit", *arguments)
    assert not Event.objects.exists()
