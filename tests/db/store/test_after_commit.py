"""What follows a commit may fail, for example because the session is lost at that moment. The commit stands."""

from __future__ import annotations

import pytest
from django.db import OperationalError, transaction

from django_pglock.models import Task
from django_pglock.store import admit, cancel, release, wake
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def fails(*values, **options):
    raise OperationalError("the session is lost")


def enqueue_at_a_key():
    keyed.step.enqueue("a")


def enqueue_several_at_keys():
    keyed.step.enqueue("a")
    keyed.call.enqueue("b")


def enqueue_after_another():
    tasks.nothing.using(after=[tasks.nothing.enqueue()]).enqueue()


def ask_to_end():
    Task.objects.filter(status="RUNNING").cancel()


@pytest.mark.parametrize(
    ("module", "name", "verb"),
    [
        (wake, "_notify", tasks.nothing.enqueue),
        (admit, "_admit_by", enqueue_at_a_key),
        (admit, "_admit_by", enqueue_several_at_keys),
        (release, "ended", enqueue_after_another),
        (cancel, "run", ask_to_end),
    ],
)
def test_a_failure_after_the_commit_is_logged_and_not_raised(monkeypatch, caplog, claim, module, name, verb):
    """Else the caller would take what is committed for failed, and its own functions would not be called."""
    tasks.nothing.enqueue()
    claim()
    called = []
    monkeypatch.setattr(module, name, fails)
    with transaction.atomic():
        verb()
        transaction.on_commit(lambda: called.append(True))
    assert called
    assert "the session is lost" in caplog.text
    assert "<locals>" not in caplog.text, "the log names the function that has failed"
