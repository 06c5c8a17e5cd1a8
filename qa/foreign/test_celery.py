"""Packages that bring tasks of Celery, unchanged, with the bridge in the place of Celery.

django-celery-email sends mail in batches, and tries a single message again by ``retry()`` with other arguments, without
leaving its loop. django-post-office enqueues after the commit. django-cacheback refreshes its cache by keyword.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
from cacheback.jobs import FunctionJob
from django.core import mail
from django.core.cache import cache
from django.core.mail import EmailMessage, send_mail
from django.db import transaction
from django.utils import timezone
from djcelery_email.tasks import send_emails
from post_office import mail as post_office
from post_office.models import Email

from django_pglock.contrib.celery import Task as CeleryTask
from django_pglock.models import Task
from qa.foreign.process import drain_elsewhere
from qa.foreign.sample.mail import Backend


@pytest.fixture(autouse=True)
def outbox():
    mail.outbox = []
    Backend.refusals.clear()
    return mail.outbox


def test_the_packages_have_the_bridge_and_not_celery():
    assert isinstance(send_emails, CeleryTask)
    assert sys.modules["celery"].__name__ == "django_pglock.contrib.celery"


def test_mail_is_sent_by_a_worker(outbox, drain):
    send_mail("Hello", "text", "me@example.org", ["you@example.org"])
    assert (outbox, Task.objects.get().task_path) == ([], "djcelery_email.tasks.send_emails")
    drain()
    assert [each.subject for each in outbox] == ["Hello"]


def test_a_message_that_is_refused_is_tried_again_alone(outbox, drain):
    Backend.refusals += ["busy", "down"]
    mail.get_connection().send_messages(
        [EmailMessage(to=[f"{name}.example"]) for name in ("a@home", "b@away", "c@home")]
    )
    drain()
    assert [each.to for each in outbox] == [["a@home.example"], ["c@home.example"], ["b@away.example"]]
    assert {*Task.objects.values_list("status", flat=True)} == {"SUCCESSFUL"}
    assert Task.objects.count() == 2


def test_a_message_that_is_always_refused_ends_in_a_failure(outbox, drain):
    Backend.refusals += ["down"] * 9
    send_mail("Hello", "text", "me@example.org", ["you@away.example"])
    drain()
    assert outbox == []
    assert [*Task.objects.values_list("status", flat=True)] == ["FAILED"]
    assert len(Backend.refusals) == 6


def test_mail_of_a_transaction_that_is_rolled_back_is_not_sent():
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        send_mail("Hello", "text", "me@example.org", ["you@example.org"])
        raise ZeroDivisionError
    assert not Task.objects.exists()


def test_a_worker_in_another_process_knows_the_tasks():
    send_mail("Hello", "text", "me@example.org", ["you@example.org"])
    post_office.send("you@example.org", "me@example.org", subject="Hello", message="text")
    assert "django_pglock.contrib.celery" not in drain_elsewhere()
    assert {*Task.objects.values_list("status", flat=True)} == {"SUCCESSFUL"}


def test_the_post_office_enqueues_after_the_commit(outbox, drain):
    with transaction.atomic():
        post_office.send("you@example.org", "me@example.org", subject="Post", message="text")
        assert not Task.objects.exists()
    assert Task.objects.get().task_path == "post_office.tasks.send_queued_mail"
    drain()
    assert [each.subject for each in outbox] == ["Post"]
    assert Email.objects.latest("pk").status == 0


def count(name):
    return f"{name} at {timezone.now()}"


def test_a_stale_cache_is_refreshed_by_a_worker(drain):
    cache.clear()
    job = FunctionJob(lifetime=60, fetch_on_miss=True)
    job.set_options = {}
    first = job.get(count, "letters")
    job.invalidate(count, "letters")
    assert job.get(count, "letters") == first
    assert Task.objects.get().task_path == "cacheback.tasks.refresh_cache"
    drain()
    assert job.get(count, "letters") != first


def test_delays_are_those_of_the_server(drain):
    send_emails.apply_async(([],), countdown=3600)
    drain()
    row = Task.objects.get()
    assert row.status == "SCHEDULED"
    assert row.run_after > timezone.now() + timedelta(minutes=50)
