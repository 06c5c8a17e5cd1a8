"""A paused queue is not claimed from."""

from __future__ import annotations

import time

import pytest

from django_pglock import enqueue_many
from django_pglock.models import Queue, Task
from django_pglock.store import pause as pause_module
from tests.db.store.fair_claims import claims_of
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_paused_queue_is_not_claimed_from_and_costs_one_probe():
    enqueue_many(keyed.serve, [{"tenant": "a"}] * 3)
    enqueue_many(tasks.nothing, [{}] * 3)
    Queue.objects.pause("default", by="me", reason="the bank is closed")
    assert Queue.objects.get().paused_by == "me"
    assert claims_of().claim(10) == []
    assert not Queue.objects.pause("default")
    Queue.objects.pause("other", by="x" * 300)
    assert Queue.objects.resume("default")
    assert len(claims_of().claim(10)) == 6
    # The row of the other queue is unchanged, because the name was too long for the column.
    [other] = Queue.objects.filter(paused_at__isnull=False)
    assert (other.name, other.paused_by) == ("other", "x" * 255)
    assert Queue.objects.get(name="default").paused_by == ""


def test_only_the_named_queue_is_paused_and_resumed(monkeypatch):
    woken = []
    monkeypatch.setattr(pause_module, "wake", lambda using, queues: woken.extend(queues))
    Queue.objects.create(name="other")
    assert Queue.objects.pause("mail", reason="closed")
    assert [*pause_module.paused_queues("default")] == ["mail"]
    Queue.objects.pause("other", by="x" * 255)
    assert Queue.objects.get(name="other").paused_by == "x" * 255, "as many as the column takes"
    assert Queue.objects.resume("mail")
    assert woken == ["mail"]
    assert not Queue.objects.resume("mail")
    assert woken == ["mail"]
    assert Queue.objects.get(name="mail").reason == ""
    assert [*pause_module.paused_queues("default")] == ["other"]


@pytest.mark.parametrize("change", [Queue.objects.pause, Queue.objects.resume])
def test_a_name_that_no_queue_has_or_can_have_is_refused(change):
    with pytest.raises(ValueError, match="must have 1 to 128 characters"):
        change("")
    with pytest.raises(ValueError, match=r"'mail\*' is no queue. Only runlockworker reads PREFIX"):
        change("mail*")
    with pytest.raises(ValueError, match="The reason contains a NUL"):
        Queue.objects.pause("mail", reason="\x00")
    assert not Queue.objects.filter(name="mail").exists()


def test_a_worker_follows_a_pause_and_a_resume_without_a_poll(worker, eventually, settings):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}

    worker()
    Queue.objects.pause("default")
    result = tasks.echo.enqueue(1)
    time.sleep(0.3)
    assert Task.objects.get(pk=result.id).status == "READY"
    Queue.objects.resume("default")
    eventually(lambda: Task.objects.get(pk=result.id).status == "SUCCESSFUL")
