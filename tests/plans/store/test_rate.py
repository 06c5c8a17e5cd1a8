"""A token is taken beside a backlog at its key, and unused buckets are searched some keys at a time."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock import Rate
from django_pglock.models import RateLimit
from django_pglock.store.admit_one import admit_statement, enqueue_statement
from django_pglock.store.rate import DELETE_UNUSED_RATES, OPEN_RATES, START_AT_RATE
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, CALL, executed, nodes, pages_read, scans_by_key
from tests.plans.store.backlog import Call
from tests.sample import keyed_tasks as keyed

KEYS, WINDOW = 20_000, 500


def calls(backlog):
    one, many = (keyed.drip.using(rate=Rate(most, per=most, burst=most)) for most in (1, BATCH))
    return {
        "OPEN_RATES": Call(filled(OPEN_RATES), [BATCH], by_index=True),
        "enqueueing": Call(enqueue_statement("default", many, CALL, "{}"), by_index=True),
        "enqueueing of one": Call(enqueue_statement("default", one, CALL, "{}"), by_index=True),
        "START_AT_RATE": Call(filled(START_AT_RATE), [["backlog"], [1.0], [1], [1]], by_index=True),
        "admission": Call(admit_statement("default", many, backlog.ids[0], "backlog"), by_index=True),
        "admission of one": Call(admit_statement("default", one, backlog.ids[0], "backlog"), by_index=True),
    }


def test_rates_with_a_due_token_are_found_by_the_index_of_dates(plans):
    assert pages_read(plans["OPEN_RATES"]) <= 20


def test_a_token_is_taken_without_reading_the_backlog(plans):
    plans.check(rows=20 * BATCH, pages=400)
    assert scans_by_key(plans["enqueueing of one"]) == [1, 1]
    assert scans_by_key(plans["admission of one"]) == [1, 2]


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
