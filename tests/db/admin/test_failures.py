"""The admin page of failures: groups, their verbs with permission, by POST, with a log entry."""

from __future__ import annotations

import re

import pytest
from django.urls import reverse

from django_pglock.models import Task
from django_pglock.store.bulk import enqueue_redrive
from django_pglock.store.release import DEPENDENCY_FAILED
from tests.db.admin.visits import add_attempt, logged, make, person, said, url
from tests.db.store.test_failures import fail

pytestmark = pytest.mark.django_db

PAGE = url("failuregroup")


def button(verb, number=7):
    return url("failuregroup", "verb", number, verb)


def confirm(client, address, rate=""):
    return client.post(address, {"confirmed": "1", "value": rate}, follow=True)


def statuses(rows):
    return [Task.objects.get(pk=row.pk).status for row in rows]


@pytest.fixture
def failed():
    return [fail(fingerprint=7, hours_ago=3), fail(fingerprint=7), fail("shop.Closed", fingerprint=8, hours_ago=2)]


def test_the_page_shows_each_group_with_links_to_its_tasks(client, failed):
    page = client.get(PAGE).content.decode()
    for text in ("Refused", "order 7", "bank.py:88", "nothing", "Closed", "3 hours"):
        assert text in page.replace("\xa0", " ")
    assert page.index("Refused") < page.index("Closed"), "the latest failure first"
    [address] = re.findall(r'href="([^"]+fingerprint__exact=7)"', page)
    tasks = client.get(address.replace("&amp;", "&"))
    assert [row.pk for row in tasks.context["cl"].result_list] == [failed[1].pk, failed[0].pk]
    assert url("task", "change", failed[1].pk) in page


def test_the_chart_of_failures_has_a_description_for_screen_readers(client, failed):
    page = client.get(PAGE).content.decode()
    hours = [0] * 24
    hours[23], hours[20] = 1, 1
    assert f">Failures in each of the last 24 hours: {', '.join(map(str, hours))}</title>" in page


def test_a_group_is_retried_at_once_after_a_confirmation(client, failed):
    person(client, "view_task", "retry_task")
    assert button("retry") in client.get(PAGE).content.decode()
    question = client.post(button("retry")).content.decode()
    assert "2 tasks would run again." in question
    assert "bank.Refused" in question
    assert statuses(failed) == ["FAILED"] * 3, "to look at the question changes nothing"
    assert said(confirm(client, button("retry"))) == ["2 tasks will run again."]
    assert statuses(failed) == ["READY", "READY", "FAILED"]
    assert logged() == [f"retry: 2 of #{failed[0].pk}, #{failed[1].pk}"]


def test_a_group_is_retried_at_a_rate_by_a_task(client, failed):
    person(client, "view_task", "retry_task")
    [text] = said(confirm(client, button("retry"), "2.5"))
    made = Task.objects.get(status="READY")
    assert made.kwargs == {"fingerprint": 7, "rate": 2.5, "with_related": False}
    assert f"#{made.pk}" in text
    assert statuses(failed) == ["FAILED"] * 3
    assert logged() == [f"redrive: group 7, 2.5 tasks a second, by #{made.pk}"]
    [text] = said(confirm(client, button("retry"), "9"))
    assert text.startswith("The group is retried already")
    assert len(logged()) == 1
    assert Task.objects.filter(status="READY").count() == 1


def test_a_group_offers_what_was_cancelled_because_of_its_tasks(client, failed):
    person(client, "view_task", "retry_task")
    final = make("CANCELLED", meta={"after": [failed[0].pk]})
    add_attempt(final, 0, DEPENDENCY_FAILED, cause=failed[0].pk)
    question = client.post(button("retry")).content.decode()
    assert "And 1 task that was cancelled because of it." in question
    client.post(button("retry"), {"confirmed": "1", "related": "1", "value": "2.5"})
    assert Task.objects.get(status="READY").kwargs["with_related"] is True
    Task.objects.filter(status="READY").delete()
    answer = client.post(button("retry"), {"confirmed": "1", "related": "1", "value": ""}, follow=True)
    assert said(answer)[1:] == ["3 tasks will run again."]


def test_the_page_shows_how_far_a_redrive_has_come(client, failed):
    made, _ = enqueue_redrive("default", 7, 1)
    assert "Will be retried" in client.get(PAGE).content.decode()
    Task.objects.filter(pk=made).update(progress={"done": 1, "total": 2, "position": 5})
    page = client.get(PAGE).content.decode()
    assert "Retrying: 1 of 2" in page
    assert url("task", "change", made) in page


def test_a_group_is_discarded_after_a_confirmation(client, failed):
    person(client, "view_task", "cancel_task")
    page = client.get(PAGE).content.decode()
    assert button("discard") in page
    assert button("retry") not in page
    question = client.post(button("discard")).content.decode()
    assert "2 failed tasks would be cancelled." in question
    assert 'name="value"' not in question
    assert said(confirm(client, button("discard"), "5")) == ["2 failed tasks were cancelled."]
    assert statuses(failed) == ["CANCELLED", "CANCELLED", "FAILED"]
    assert logged() == [f"discard: 2 of #{failed[0].pk}, #{failed[1].pk}"]


@pytest.mark.parametrize("rate", ["x", "0", "-1", "nan", "1e9"])
def test_an_invalid_rate_is_refused(client, failed, rate):
    person(client, "view_task", "retry_task")
    assert said(confirm(client, button("retry"), rate)) == ["Enter a number of tasks a second, such as 10."]
    assert (statuses(failed), logged()) == (["FAILED"] * 3, [])
    assert not Task.objects.filter(status="READY").exists()


def test_failures_need_the_permission_to_view_tasks(client, failed):
    person(client)
    assert client.get(PAGE).status_code == 403
    person(client, "view_task")
    page = client.get(PAGE).content.decode()
    assert button("retry") not in page
    assert button("discard") not in page
    assert client.post(PAGE).status_code == 405
    person(client, "view_task", "retry_task")
    assert client.post(button("retry", 2**63)).status_code == 404
    assert (statuses(failed), logged()) == (["FAILED"] * 3, [])


def test_a_verb_on_a_group_without_failures_shows_a_message(client, failed):
    person(client, "view_task", "retry_task")
    assert said(client.post(button("retry", 9), follow=True)) == ["No task of this group is failed any more."]


def test_a_large_group_is_changed_by_a_task(client, failed, monkeypatch):
    monkeypatch.setattr("django_pglock.admin.pages.WINDOW", 1)
    person(client, "view_task", "retry_task")
    assert "in the background" in client.post(button("retry")).content.decode()
    confirm(client, button("retry"))
    [made] = Task.objects.filter(status="READY")
    assert made.args == ["retry", [failed[0].pk, failed[1].pk]]


def test_the_index_of_the_admin_lists_the_page_with_the_right_to_view_tasks(client):
    assert PAGE in client.get(reverse("admin:index")).content.decode()
    person(client, "view_queue")
    assert PAGE not in client.get(reverse("admin:index")).content.decode()
