"""Tasks in the archive are found by the key of each partition, and in one partition if the day is known."""

from __future__ import annotations

from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import ArchivedTask
from django_pglock.store.archive_state import archive_state, bounds_of, table_of
from django_pglock.store.archived import ARE_ARCHIVED, HAVE_SUCCEEDED, find_archived
from django_pglock.store.statements import array_of_numbers, filled
from tests.plans.reading import BATCH, executed, indexes, nodes


def kinds(plan):
    return {node["Node Type"] for node in nodes(plan)}


def test_a_task_is_found_by_the_key_of_each_partition(archived):
    with CaptureQueriesContext(connection) as queries:
        assert find_archived("default", archived[0]).pk == archived[0]
    ids = array_of_numbers(archived[:BATCH])
    both = executed(filled(HAVE_SUCCEEDED), [ids, ids])
    assert "django_pglock_task_pkey" in indexes(both)
    for plan in (executed(queries[-1]["sql"]), executed(filled(ARE_ARCHIVED), [ids]), both):
        assert "Seq Scan" not in kinds(plan)
        assert any("archivedtask" in name for name in indexes(plan))
    a_day_is_read_from_its_partition()


def a_day_is_read_from_its_partition():
    day = archive_state("default").days[1]
    start, end = bounds_of(day)
    rows = ArchivedTask.objects.filter(finished_at__gte=start, finished_at__lt=end).order_by("-pk")
    sql, values = rows.values("pk")[:BATCH].query.get_compiler("default").as_sql()
    plan = executed(sql, values)
    assert {node["Relation Name"] for node in nodes(plan) if "Relation Name" in node} == {table_of(day)}
    scans = [node for node in nodes(plan) if "Scan" in node["Node Type"]]
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}
    assert sum(node["Actual Rows"] for node in scans) <= 2 * BATCH
