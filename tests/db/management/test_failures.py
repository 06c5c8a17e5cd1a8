"""``manage.py locktasks failures`` and ``redrive``."""

from __future__ import annotations

import json

import pytest
from django.core.management import CommandError

from django_pglock.models import Task
from tests.db.management.commands.test_locktasks import answer, locktasks  # noqa: F401 - a fixture
from tests.db.store.test_failures import PATH, fail

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def failed():
    """Two groups: two tasks refused by the bank, and a task of another function."""
    return [fail(fingerprint=7), fail(fingerprint=7), fail("shop.Closed", fingerprint=8, task_path="shop.tasks.ship")]


def statuses(rows):
    return [Task.objects.get(pk=row.pk).status for row in rows]


def test_groups_are_a_table(failed):
    head, *lines = locktasks("failures").splitlines()
    assert head.split() == ["FINGERPRINT", "FAILED", "LAST", "TASK", "EXCEPTION", "PLACE"]
    first, second = sorted(lines)
    assert first.split()[:2] == ["7", "2"]
    assert first.split()[5:] == [PATH, "bank.Refused", "bank.py:88"]
    assert second.split()[0] == "8"
    Task.objects.all().delete()
    assert locktasks("failures") == "No task has failed.\n"


def test_groups_are_json(failed):
    groups = {each["fingerprint"]: each for each in json.loads(locktasks("failures", "--json"))}
    assert (groups[7]["count"], groups[7]["newest"], groups[7]["message"]) == (2, failed[1].pk, "order 7")
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
def test_options_select_groups(failed, options, found):
    assert sorted(each["fingerprint"] for each in json.loads(locktasks("failures", "--json", *options))) == found


def test_a_group_is_retried_at_once(failed):
    said = locktasks("redrive", "--exception", "Refused", "--yes")
    assert said == "2 tasks will run again.\n"
    assert statuses(failed) == ["READY", "READY", "FAILED"]


def test_a_redrive_asks_first_and_may_be_a_dry_run(failed, answer):  # noqa: F811
    assert locktasks("redrive", "--fingerprint", 8, "--dry-run") == "1 task would run again.\n"
    asked = answer("n")
    with pytest.raises(CommandError, match="No task was changed"):
        locktasks("redrive", "--fingerprint", 8, "--rate", 5)
    assert asked == ["Continue? [y/N] "]
    assert statuses(failed) == ["FAILED"] * 3
    answer("y")
    locktasks("redrive", "--fingerprint", 8)
    assert statuses(failed) == ["FAILED", "FAILED", "READY"]
    assert locktasks("redrive", "--fingerprint", 8) == "0 tasks would run again.\n", "nothing to ask about"


def test_a_redrive_at_a_rate_is_run_by_a_task(failed):
    said = locktasks("redrive", "--exception", "Refused", "--rate", 2.5, "--yes")
    made = Task.objects.get(status="READY")
    assert made.kwargs == {"fingerprint": 7, "rate": 2.5}
    assert f"Task {made.pk} retries the failures of group 7. To stop it: manage.py locktasks cancel {made.pk}" in said
    assert statuses(failed) == ["FAILED"] * 3
    again = locktasks("redrive", "--fingerprint", 7, "--rate", 9, "--yes")
    assert f"Task {made.pk} retries the failures of group 7 already." in again
    locktasks("cancel", made.pk)
    assert Task.objects.get(pk=made.pk).status == "CANCELLED"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "No failures are selected"),
        (["--fingerprint", str(2**63)], "argument --fingerprint: '9223372036854775808' is not a number"),
        (["--exception", "Refused", "--rate", "0"], "'0' is not a number from 0.001 to 5000"),
    ],
)
def test_invalid_arguments_are_refused(failed, options, message):
    with pytest.raises(CommandError, match=message):
        locktasks("redrive", *options, "--yes")
    assert statuses(failed) == ["FAILED"] * 3
