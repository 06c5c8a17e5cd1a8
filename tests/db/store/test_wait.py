"""The rows of those who wait for results."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Waiter
from django_pglock.store.wait import ended, note_waits
from tests.db.store.waiting import results_of

pytestmark = pytest.mark.django_db(transaction=True)


def test_what_a_thousand_wait_for_is_looked_up_by_one_statement():
    ids = [int(result.id) for result in results_of(1000)]
    with CaptureQueriesContext(connection) as queries:
        assert ended("default", [*ids, 10**15]) == [(10**15, False)]
        noted = note_waits("default", ids, instead_of=[])
        assert sorted(noted) == sorted(ids)
        assert note_waits("default", [], instead_of=list(noted.values())) == {}
    assert len(queries) == 3
    assert not Waiter.objects.exists()
