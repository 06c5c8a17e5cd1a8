"""The number of an attempt that people see. A claim that is given back before it begins is no attempt."""

from __future__ import annotations

import json
import math

import pytest
from django.core.management import call_command
from django.urls import reverse

from django_pglock.models import Attempt, Task
from django_pglock.store.outcome import Abandoned, Failed, Failure, GivenBack, Retried, Snoozed, Succeeded
from django_pglock.store.rescue import rescue
from django_pglock.store.settle import give_back, settle
from django_pglock.worker.child.run import prepare
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)

FAILURE = Failure("builtins.ValueError", "")


def settle_one(claim, outcome):
    assert settle("default", [(claim, outcome)], claim.worker)
    Task.objects.filter(status="SCHEDULED").run_now()


@pytest.mark.parametrize("outcome", [GivenBack(), Snoozed(0.0), Snoozed(60.0), Abandoned(60.0)])
def test_a_claim_given_back_unused_is_not_shown_as_an_attempt(claim, outcome):
    result = tasks.nothing.enqueue()
    [unused] = claim()
    settle_one(unused, outcome)
    assert Task.objects.get().attempts_made == 0
    [used] = claim()
    assert (unused.attempt, used.attempt) == (1, 2), "the fence"
    assert (unused.number, used.number) == (1, 1)
    assert "attempt 1" in repr(used)
    assert used.log_fields()["attempt"] == 1
    assert prepare(used, "default").result.attempts == 1
    settle_one(used, Succeeded())
    assert Task.objects.get().attempts_made == 1
    assert "attempt 1" in repr(Task.objects.get())
    result.refresh()
    assert result.attempts == 1


def test_a_claim_whose_answer_was_lost_is_no_attempt(claim):
    tasks.nothing.enqueue()
    [lost] = claim()
    give_back("default", lost.worker, [])
    assert Task.objects.get().attempts_made == 0


def test_failures_and_rescues_are_numbered_without_gaps(claim):
    tasks.nothing.using(max_attempts=5).enqueue()
    for outcome in (GivenBack(), Retried(FAILURE, 0.0), GivenBack(), GivenBack()):
        settle_one(*claim(), outcome)
    claim()
    rescue("default", unbroken=math.inf)
    settle_one(*claim(), GivenBack())
    [last] = claim()
    assert prepare(last, "default").result.attempts == last.number == 3
    settle_one(last, Failed(FAILURE))
    assert list(Attempt.objects.order_by("id").values_list("number", "outcome")) == [
        (1, "FAILED"),
        (2, "LOST"),
        (3, "FAILED"),
    ]


def test_commands_and_the_admin_show_the_number_of_attempts_without_unused_claims(claim, admin_client, capsys):
    tasks.nothing.enqueue()
    for outcome in (GivenBack(), Succeeded()):
        settle_one(*claim(), outcome)
    row = Task.objects.get()
    for arguments in (("list",), ("show", str(row.pk))):
        call_command("locktasks", *arguments, "--json")
        shown = json.loads(capsys.readouterr().out)
        [about] = shown if isinstance(shown, list) else [shown]
        assert (about["attempts"], about["claims"]) == (1, 2)
    page = admin_client.get(reverse("admin:django_pglock_task_changelist")).content.decode()
    assert "&times;" not in page, "it names more than one attempt"
    page = admin_client.get(reverse("admin:django_pglock_task_change", args=[row.pk])).content.decode()
    assert '<div class="readonly">1</div>' in page
