"""The admin page of queues: pause and resume, with permission, by POST, with a log entry."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote

from django_pglock.admin import queues
from django_pglock.models import Number, Queue
from tests.db.admin.visits import act, make, person, said, url

pytestmark = pytest.mark.django_db

LIST = url("queue")


def page_of(name):
    return url("queue", "change", name)


def button(verb, name="mail"):
    return url("queue", "verb", name, verb)


@pytest.fixture
def queue():
    """A queue that has been paused and resumed, so that it has a row."""
    Queue.objects.pause("mail")
    Queue.objects.resume("mail")
    return Queue.objects.get()


def is_paused(name="mail"):
    return Queue.objects.paused().filter(name=name).exists()


def test_a_button_pauses_and_another_resumes(client, queue):
    user = person(client, "view_queue", "pause_queue")
    page = client.get(page_of("mail")).content.decode()
    assert button("pause") in page
    assert button("resume") not in page
    assert 'name="value"' in page
    response = client.post(button("pause"), {"value": "provider \x00is down"}, follow=True)
    assert said(response) == ["1 queue was paused."]
    queue.refresh_from_db()
    assert (queue.paused_by, queue.reason) == (user.username, "provider is down")
    page = response.content.decode()
    assert "provider is down" in page
    assert button("resume") in page
    assert said(client.post(button("pause"), follow=True)) == ["0 queues were paused."]
    assert said(client.post(button("resume"), follow=True)) == ["1 queue was resumed."]
    assert not is_paused()
    messages = list(LogEntry.objects.filter(user=user).order_by("pk").values_list("object_id", "change_message"))
    assert messages == [("mail", "pause: mail (provider is down)"), ("mail", "pause: -"), ("mail", "resume: mail")]


def test_actions_on_the_list(client, queue):
    Queue.objects.pause("night")
    rows = list(Queue.objects.all())
    person(client, "view_queue", "pause_queue")
    assert said(act(client, "pause", *rows, url=LIST)) == ["1 queue was paused."]
    assert said(act(client, "resume", *rows, url=LIST)) == ["2 queues were resumed."]
    assert not Queue.objects.paused().exists()
    assert list(LogEntry.objects.order_by("pk").values_list("object_id", "change_message")) == [
        (None, "pause: mail"),
        (None, "resume: mail, night"),
    ]


def test_a_queue_that_has_never_been_paused_is_paused_by_its_button(client):
    make(queue="of READY")
    person(client, "view_queue")
    assert client.post(button("pause", "of READY")).status_code == 403
    assert not Queue.objects.exists()
    user = person(client, "view_queue", "pause_queue")
    assert button("pause", "of READY") in client.get(LIST).content.decode()
    response = client.post(button("pause", "of READY"), {"value": "not yet"}, follow=True)
    assert said(response) == ["1 queue was paused."]
    row = Queue.objects.get()
    assert (row.name, row.paused_by, row.reason) == ("of READY", user.username, "not yet")
    assert LogEntry.objects.get(user=user).object_id == "of READY"


def test_a_name_that_nothing_has_is_no_queue(client):
    person(client, "view_queue", "pause_queue")
    for name in ("typo", "defa*"):
        assert client.post(button("pause", name)).status_code == 404
    assert not Queue.objects.exists()


def test_a_paused_queue_cannot_be_deleted(client, queue):
    person(client, "view_queue", "delete_queue")
    address = url("queue", "delete", "mail")
    Queue.objects.pause("mail")
    assert client.post(address, {"post": "yes"}).status_code == 403
    assert "delete_selected" not in client.get(LIST).content.decode()
    Queue.objects.resume("mail")
    assert client.post(address, {"post": "yes"}).status_code == 302
    assert not Queue.objects.exists()


@pytest.mark.parametrize("name", ["a/b", "<script>alert('x')</script>", "mail/do/pause", "ä ?#&%_2F"])
def test_a_queue_of_any_name_has_an_escaped_page_and_a_button(client, name):
    person(client, "view_queue", "pause_queue")
    Queue.objects.pause(name, reason="<script>alert('x')</script>")
    listing = client.get(LIST).content.decode()
    assert "<script>alert" not in listing
    [queue] = Queue.objects.all()
    assert queue.name == name
    page = client.get(page_of(quote(name))).content.decode()
    assert "<script>alert" not in page
    for text in (listing, page):
        assert " style=" not in text
        assert "onclick" not in text
    assert client.post(button("resume", quote(name))).status_code == 302
    assert not is_paused(name)


@pytest.mark.parametrize(("query", "count"), [("", 2), ("?paused=1", 1), ("?q=ma", 1), ("?paused=x", 2), ("?o=1", 2)])
def test_the_list_of_queues_answers_any_filter_value(client, queue, query, count):
    Queue.objects.pause("night")
    person(client, "view_queue")
    response = client.get(LIST + query, follow=True)
    assert response.status_code == 200
    assert response.context["cl"].result_count == count


def test_the_list_has_every_queue(client, queue):
    person(client, "view_queue", "view_task", "pause_queue")
    make("READY", queue="of READY")
    page = client.get(LIST)
    names = set(page.context["pglock_queues"])
    assert "of READY" in names
    assert "default" in names, "from the settings and the code"
    assert "mail" not in names, "it has a row"
    assert "task/?queue=of%20READY" in page.content.decode()


def test_the_button_and_the_link_to_tasks_need_their_rights(client):
    person(client, "view_queue")
    make(queue="bulk")
    page = client.get(LIST).content.decode()
    assert "bulk" in page
    assert button("pause", "bulk") not in page
    assert "?queue=bulk" not in page


def test_an_empty_list_of_queues_says_how_a_queue_is_created(client, monkeypatch):
    monkeypatch.setattr(queues, "queues_of_the_code", set)
    person(client, "view_queue")
    text = "A queue exists as soon as a task is enqueued into it"
    assert text in client.get(LIST).content.decode()
    make()
    Number.objects.all().delete()
    assert text not in client.get(LIST).content.decode()
