"""The admin page of leases."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.utils import timezone

from django_pglock import Lease, LockLost
from django_pglock.models import Lease as LeaseRow
from tests.db.admin.visits import act, person, said, url

pytestmark = pytest.mark.django_db

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
