"""The admin pages of advisory locks, leases and workers."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_pglock import Lease, LockLost, lock
from django_pglock.keys import make_key
from django_pglock.models import Lease as LeaseRow
from django_pglock.models import Worker
from tests.db.admin.visits import act, make, person, said, start_worker, url
from tests.db.locks.sessions import Somebody
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db


LOCKS = url("advisorylock")


@pytest.mark.django_db(transaction=True)
def test_locks_are_listed_by_name_and_ended_only_with_permission(client, eventually):
    somebody = Somebody()
    try:
        somebody.holds("somebodys lock")
        with lock("order:5", timeout=5):
            person(client, "view_advisorylock")
            page = client.get(LOCKS).content.decode()
            assert str(make_key("order:5").number) in page
            assert str(make_key("somebodys lock").number) in page
            found = client.get(LOCKS, {"q": "somebodys lock"})
            [row] = found.context["cl"].result_list
            assert client.get(url("advisorylock", "change", row.pk)).status_code == 200
            act(client, "terminate", row, url=LOCKS)
            assert not somebody.can_have("order:5"), "the session still lives"

            person(client, "view_advisorylock", "terminate_advisorylock")
            assert said(act(client, "terminate", row, url=LOCKS)) == ["1 session was ended."]
            eventually(lambda: not client.get(LOCKS, {"q": "somebodys lock"}).context["cl"].result_list)
            assert LogEntry.objects.filter(change_message__startswith="terminate").exists()
    finally:
        somebody.leaves()


# The admin page of leases.


LEASES = url("lease")


@pytest.mark.django_db(transaction=True)
def test_leases_are_listed_and_revoked_only_with_permission(client):
    with Lease("early", ttl=60, min_hold=30):
        pass
    with pytest.raises(LockLost), Lease("nightly", ttl=60) as held, Lease("mutex"):
        row = LeaseRow.objects.get(name="nightly")
        person(client, "view_lease")
        page = client.get(LEASES).content.decode()
        for text in ("nightly", held.owner, "mutex", "never", "released, not free yet"):
            assert text in page
        for query, names in (({"held": "1"}, ["mutex", "nightly"]), ({"q": "night"}, ["nightly"])):
            assert [each.name for each in client.get(LEASES, query).context["cl"].result_list] == names
        assert client.get(url("lease", "change", row.pk)).status_code == 200
        act(client, "free", row, url=LEASES)
        held.extend()
        person(client, "view_lease", "free_lease")
        assert said(act(client, "free", row, url=LEASES)) == ["1 lease was revoked."]
        assert said(act(client, "free", row, url=LEASES)) == ["0 leases were revoked."]
    assert LogEntry.objects.filter(change_message="free: 1 of nightly").count() == 1


@pytest.mark.django_db(transaction=True)
def test_no_user_can_delete_a_lease_because_its_next_token_would_be_smaller(admin_client):
    """Fences in the rows of users would then refuse the next holder."""
    with Lease("nightly", ttl=60) as first:
        pass
    row = LeaseRow.objects.get(name="nightly")
    delete = url("lease", "delete", row.pk)
    assert delete not in admin_client.get(url("lease", "change", row.pk)).content.decode()
    assert "delete_selected" not in admin_client.get(LEASES).content.decode()
    assert admin_client.post(delete, {"post": "yes"}).status_code == 403
    data = {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"}
    admin_client.post(LEASES, data, follow=True)
    with Lease("nightly", ttl=60) as second:
        assert second.token == first.token + 1
    assert not Permission.objects.filter(codename="delete_lease").exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_wrong_clock_of_the_host_changes_nothing(client, monkeypatch, hours):
    """The server's clock decides: a lease that is held is shown as held."""
    right = timezone.now
    monkeypatch.setattr(timezone, "now", lambda: right() + timedelta(hours=hours))
    person(client, "view_lease")
    with Lease("nightly", ttl=60):
        page = client.get(LEASES).content.decode()
        assert "held" in re.findall(r'<span class="pglock-status[^>]*>([^<]*)', page)
        assert re.search(r"in (59|60|[1-5]\d) s", page)


# The admin page of workers.


def test_workers_are_listed_with_what_they_run_in_one_query(client):
    person(client, "view_worker")
    worker = start_worker("web1:42")
    make("RUNNING", worker=worker)
    with CaptureQueriesContext(connection) as queries:
        page = client.get(url("worker")).content.decode()
    assert "web1:42" in page
    assert "mail" in page
    assert (
        sum('FROM "django_pglock_worker"' in each["sql"] and "COUNT" not in each["sql"][:20] for each in queries) == 1
    )
    assert client.get(url("worker", "change", worker)).status_code == 200


@pytest.mark.parametrize(("runs", "state"), [(True, "working"), (False, "idle")])
def test_a_worker_that_runs_a_task_is_not_idle_although_it_finds_no_other(client, runs, state):
    person(client, "view_worker")
    worker = start_worker("web1:42")
    Worker.objects.filter(pk=worker).update(is_sleeping=True)
    if runs:
        make("RUNNING", worker=worker)
    assert f">{state}<" in client.get(url("worker")).content.decode()


def test_a_worker_whose_last_heartbeat_is_beyond_the_limit_is_marked(client, settings):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 40.0}
    person(client, "view_worker")
    worker = start_worker("web1:42")
    for seconds, is_marked in ((300, False), (500, True)):
        Worker.objects.filter(pk=worker).update(heartbeat_at=Now() - timedelta(seconds=seconds))
        assert (">no heartbeat<" in client.get(url("worker")).content.decode()) == is_marked


def test_workers_have_pages_whatever_the_style_of_intervals_is(client):
    person(client, "view_worker")
    worker = start_worker("web1:42")
    execute_sql("SET LOCAL IntervalStyle = 'sql_standard'")
    page = client.get(url("worker"))
    assert re.search(r"\d+\.\d s ago", page.content.decode())
    assert client.get(url("worker", "change", worker)).status_code == 200
