"""Unused buckets of ``rate=`` are searched along the primary key, some keys at a time."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.models import RateLimit
from django_pglock.store.rate import DELETE_UNUSED_RATES, OPEN_RATES
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, executed, nodes, pages_read
from tests.plans.store.backlog import Call

KEYS, WINDOW = 20_000, 500


def calls(_backlog):
    return {"OPEN_RATES": Call(filled(OPEN_RATES), [BATCH], by_index=True)}


def test_rates_with_a_due_token_are_found_by_the_index_of_dates(plans):
    plans.check(pages=20)


@pytest.fixture
def buckets():
    """All buckets are in use, but every hundredth."""
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_pglock_ratelimit")
        cursor.execute(
            "INSERT INTO django_pglock_ratelimit (key, arrives_at)"
            " SELECT 'key ' || n, now() - CASE WHEN n %% 100 = 0 THEN interval '2 days' ELSE interval '0' END"
            " FROM generate_series(1, %s) AS n",
            [KEYS],
        )


@pytest.mark.django_db
@pytest.mark.parametrize("statistics", ["of an empty table", "of now"])
@pytest.mark.parametrize("after", ["", "key 5"])
def test_deleting_unused_rates_reads_only_a_window_of_keys(buckets, statistics, after):
    """With a million keys, a statement without an index on the dates reads all of them in a quarter of a second."""
    if statistics == "of now":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE django_pglock_ratelimit")
    plan = executed(filled(DELETE_UNUSED_RATES), [after, WINDOW], by_index=True)
    [window] = [node for node in nodes(plan) if node["Node Type"] == "Limit"]
    assert window["Actual Rows"] == WINDOW
    scans = [node for node in nodes(plan) if node.get("Relation Name") == "django_pglock_ratelimit"]
    read = sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in scans
        if "Scan" in node["Node Type"]
    )
    assert WINDOW < read <= WINDOW + 2 * WINDOW / 10, "the window, and twice those that are deleted"
    assert pages_read(plan) < 2 * WINDOW
    assert RateLimit.objects.count() == KEYS
