"""The text of an exception can always be read."""

from __future__ import annotations

import traceback

from django_pglock import error_reading
from tests.sample import hostile_tasks


def test_a_message_that_cannot_be_read_is_named():
    assert error_reading.one_line(ValueError("two\n lines ")) == "two lines"
    assert error_reading.one_line(hostile_tasks.NoText()) == "its message cannot be read (RuntimeError)"


def test_a_traceback_that_python_cannot_print_is_the_class_with_the_message(monkeypatch):
    def fail(error):
        raise RecursionError

    assert "NoText" in error_reading.traceback_of(hostile_tasks.NoText())
    monkeypatch.setattr(traceback, "format_exception", fail)
    assert error_reading.traceback_of(ValueError("seven")) == "builtins.ValueError: seven\n"


def test_an_exception_without_a_cause_follows_the_one_that_was_handled():
    first, second, third = ValueError(), KeyError(), OSError()
    second.__context__ = first
    assert error_reading.following(second) is first
    second.__cause__ = third
    assert error_reading.following(second) is third
