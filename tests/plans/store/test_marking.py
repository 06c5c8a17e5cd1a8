"""A claim that marks rows walks the index of the rows that it may move, and stops."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.plans.reading import nodes, plan_of
from tests.sample.models import Parcel, Sender

pytestmark = pytest.mark.django_db


def test_a_claim_that_marks_rows_walks_a_partial_index_in_order():
    sender = Sender.objects.create(name="a shop")
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO sample_parcel (sender_id, weight, status, attempts)
               SELECT %s, n, CASE WHEN n %% 20 = 0 THEN 'new' ELSE 'lost' END, 0 FROM generate_series(1, 20000) AS n""",
            [sender.pk],
        )
        cursor.execute("ANALYZE sample_parcel")
    with CaptureQueriesContext(connection) as queries:
        Parcel.objects.filter(status__in=["new", "returned"]).order_by("weight").claim_update(10, status="taken")
    [statement] = [query["sql"] for query in queries if "UPDATE" in query["sql"]]
    plan = list(nodes(plan_of(statement)))
    scans = {node.get("Index Name") for node in plan if node.get("Relation Name") == "sample_parcel"}
    assert scans == {"sample_parcel_free", "sample_parcel_pkey", None}, plan
    assert "Seq Scan" not in {node["Node Type"] for node in plan}
