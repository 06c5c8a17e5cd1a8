"""Which arguments a captured call passes, and the text of the statements of a trigger."""

# ruff: noqa: A006 - a capture passes an argument of this name

from __future__ import annotations

from types import SimpleNamespace

import pytest

from django_pglock.errors import TaskOptionError
from django_pglock.store.capture import ARGUMENTS, Captured, Columns, arguments_of, body_of
from tests.sample import captured_tasks as tasks


def arguments(func, *, takes_context=False):
    return arguments_of(SimpleNamespace(func=func, takes_context=takes_context, group=None, module_path="app.f"))


def test_a_captured_call_passes_the_arguments_that_the_function_has_parameters_for():
    assert arguments(lambda id, model: None) == {"id", "model"}
    assert arguments(lambda *ids, operation: None) == {"operation"}, "they are passed by name"
    assert arguments(lambda context, ids, other=1: None, takes_context=True) == {"ids"}
    assert arguments(lambda **all: None) == {*ARGUMENTS} - {"id"}
    assert arguments(lambda id, **others: None) == {*ARGUMENTS} - {"ids"}


@pytest.mark.parametrize("func", [lambda context: None, lambda id, ids: None, lambda id, /: None])
def test_a_function_that_a_capture_cannot_call_is_refused(func):
    with pytest.raises(TaskOptionError, match="cannot be called by a capture"):
        arguments(func)


UPDATE = Captured("update", "app.Model", Columns('"id"', ('"id"',)), ("new_rows",))


def test_the_statements_have_only_what_the_task_needs():
    _, body = body_of(tasks.locked_by_id, UPDATE, size=10)
    assert "'product:' || call.id::text\n" in body
    assert "concurrency" not in body, "a column without a value"
    assert "DISTINCT" not in body, "the ids of one table differ in any case"


def test_unique_keys_are_taken_in_the_order_of_python_whatever_the_collation():
    _, body = body_of(tasks.ship, UPDATE, size=10)
    assert body.count('COLLATE "C"\n    ON CONFLICT') == body.count("ORDER BY length(") - 1 == 1
    assert body.count('ORDER BY length(unique_key), unique_key COLLATE "C" FOR SHARE') == 1


def test_a_key_leaves_two_hundred_characters_of_its_column_for_the_values_of_a_row():
    body_of(tasks.reindex.using(lock="x" * 312), UPDATE, size=10)
    with pytest.raises(TaskOptionError, match="one of its keys may become too long"):
        body_of(tasks.reindex.using(lock="x" * 313), UPDATE, size=10)
