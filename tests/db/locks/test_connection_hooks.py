"""The wrapper of a connection that holds locks: their names in statements, and where nothing is added."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock import lock
from django_pglock.keys import make_key
from django_pglock.models import AdvisoryLock
from tests.db.locks.sessions import my_pid
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def test_holders_are_named_whatever_they_do_meanwhile(somebody):
    """PostgreSQL knows only numbers. A comment with the name is before each statement of the holder."""
    with lock("first 50%"), lock("second"):
        Effect.objects.filter(name="%").count()
        names = dict(AdvisoryLock.objects.filter(pid=my_pid()).values_list("key", "name"))
        # Also with other locks meanwhile. Another session queries, so the last statement of this one is that of the
        # lock.
        with lock("third"):
            seen = somebody.ask("SELECT count(*) FROM django_pglock_advisorylock WHERE name IN ('second', 'third')")
        assert seen == 2
        assert somebody.ask("SELECT count(*) FROM django_pglock_advisorylock WHERE name = 'second'") == 1
    assert names == {make_key("first 50%").number: "first 50%", make_key("second").number: "second"}
    assert len(connection.execute_wrappers) == 1, "one wrapper, forever"


def test_a_hint_for_the_planner_stays_the_first_comment():
    with CaptureQueriesContext(connection) as queries, lock("a"), connection.cursor() as cursor:
        cursor.execute("/*+ SeqScan(x) */ SELECT 1")
        cursor.execute("SELECT 2")
    assert queries.captured_queries[1]["sql"].startswith("/*+ SeqScan")
    assert queries.captured_queries[2]["sql"].startswith("/* django_pglock:")
