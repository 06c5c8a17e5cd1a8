"""The admin page of advisory locks."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry

from django_pglock import lock
from django_pglock.keys import make_key
from tests.db.admin.visits import act, person, said, url
from tests.db.locks.sessions import Somebody

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
