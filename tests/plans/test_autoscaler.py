"""The query of the autoscaler in ``deploy/kubernetes.yaml`` stops early."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.plans.reading import BATCH, analyze, executed, insert, pages_read, rows_read
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("statistics", ["from before", "of now"])
def test_the_query_of_the_autoscaler_stops_early(new_table, statistics):
    """With statistics of the table: another program sends this query, without our planner settings."""
    insert("SUCCESSFUL", 20_000)
    analyze()
    insert("SCHEDULED", 20_000, seconds=60)
    insert("READY", BATCH, fair="tenant")
    if statistics == "of now":
        analyze()
    insert("READY", 10_000)
    insert("SCHEDULED", BATCH, seconds=-60)
    [query] = re.findall(r"query: >-\n(.*?) #", (ROOT / "deploy" / "kubernetes.yaml").read_text(), re.DOTALL)
    assert execute_sql(query)[0] == (1000 + BATCH + BATCH,), "of the ready ones no more, those in turns, and those due"
    plan = executed(query)
    assert rows_read(plan) <= 1000 + 3 * BATCH
    assert pages_read(plan) < 400
