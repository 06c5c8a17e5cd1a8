"""Rows of tasks whose JSON Python refuses: a program that writes SQL may store what no call of enqueue() stores."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.models import Task
from django_pglock.store.unreadable import first_row
from django_pglock.tasks.redaction import NOT_SHOWN, REDACTED, shown
from tests.db.store.test_prune import make

pytestmark = pytest.mark.django_db

DIGITS = "('[' || repeat('9', 6000) || ']')::jsonb"
NESTED = "(repeat('[', 6000) || repeat(']', 6000))::jsonb"


def unreadable(field="args", value=DIGITS, **fields):
    row = make("FAILED", days=0, **fields)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {Task._meta.db_table} SET {field} = {value} WHERE id = %s", (row.pk,))
    return row


def test_a_value_that_cannot_be_read_is_replaced_and_the_others_are_there():
    row = unreadable(kwargs={"order": 5}, task_path="shop.unknown")
    found = first_row(Task.objects.filter(pk=row.pk))
    assert (found.pk, found.status, found.args, found.kwargs) == (row.pk, "FAILED", NOT_SHOWN, {"order": 5})
    assert found.get_deferred_fields() == set()
    assert shown(found, "args") == NOT_SHOWN


def test_a_row_is_read_by_one_statement_and_one_that_is_not_there_is_none(django_assert_num_queries):
    row = make("FAILED", days=0)
    with django_assert_num_queries(1):
        assert first_row(Task.objects.filter(pk=row.pk)) == row
    assert first_row(Task.objects.filter(pk=row.pk + 1)) is None


def test_all_arguments_are_hidden_if_the_metadata_cannot_be_read():
    row = unreadable("meta", "('{\"a\": ' || repeat('9', 6000) || '}')::jsonb", args=["4111"])
    found = first_row(Task.objects.filter(pk=row.pk))
    assert shown(found, "args") == [REDACTED]


def test_a_deeply_nested_value_is_shown_to_a_limited_depth():
    found = first_row(Task.objects.filter(pk=unreadable(value=NESTED).pk))
    assert NOT_SHOWN in str(shown(found, "args"))
