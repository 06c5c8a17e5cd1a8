"""Exceptions are read without the code of their classes."""

from __future__ import annotations

import pytest

from django_pglock import error_reading
from django_pglock.errors import TaskTimeout
from tests.sample import hostile_tasks


class Problem(Exception):
    sqlstate = "25006"


def raised(*errors):
    """Return the last exception, raised from the one before, and so on."""
    before = None
    for error in errors:
        try:
            raise error from before
        except type(error):
            before = error
    return before


@pytest.mark.parametrize("kind", hostile_tasks.HOSTILE)
def test_all_fields_of_a_hostile_exception_are_read(kind):
    hostile = hostile_tasks.HOSTILE[kind]
    error, last = hostile(), hostile()
    assert error_reading.cause_of(raised(error, last)) is error
    assert error_reading.following(last) is error
    assert error_reading.trace_of(error) is not None
    assert error_reading.is_a(error, BaseException)
    assert not error_reading.is_a(error, (OSError, TaskTimeout))
    assert error_reading.class_name_of(error) in (kind, "ExceptionGroup")
    assert error_reading.class_path_of(error).endswith(error_reading.class_name_of(error))
    assert id(error) in map(id, error_reading.chain_of(last))
    assert error_reading.sqlstate_of(error) is None
    assert error_reading.class_name_of(error) in error_reading.traceback_of(last)
    assert isinstance(error_reading.text_of(error), str)


def test_what_python_cannot_print_is_described_with_its_causes():
    text = error_reading.traceback_of(raised(ValueError("first"), hostile_tasks.NoChain(), KeyError("last")))
    assert text.count("Traceback (most recent call last):") == 3
    assert text.count("The above exception came before the following exception:") == 2
    said = [line for line in text.splitlines() if line and line[0] not in " T"]
    assert (said[0], said[2], len(said)) == ("ValueError: first", "KeyError: 'last'", 3)
    assert said[1] == "tests.sample.hostile_tasks.NoChain: this exception cannot be printed (RuntimeError)"


def test_causes_may_be_a_circle():
    first, second = Problem(), hostile_tasks.NoChain()
    first.__cause__ = second
    BaseException.__dict__["__cause__"].__set__(second, first)
    assert error_reading.traceback_of(first).count("this exception cannot be printed") == 2
    assert len(list(error_reading.chain_of(first))) == 2


def test_the_code_of_the_server_is_a_text_or_none():
    assert error_reading.sqlstate_of(Problem()) == "25006"
    Problem.sqlstate = 25006
    assert error_reading.sqlstate_of(Problem()) is None
    assert error_reading.sqlstate_of(None) is None


def read_attribute(error):
    return error_reading.attribute_of(error, "sqlstate")


class Slow(Exception):
    """As if Ctrl-C came while an attribute is read."""

    def __getattribute__(self, name):
        raise KeyboardInterrupt


class SlowText(Exception):
    def __str__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (read_attribute, Slow),
        (error_reading.text_of, SlowText),
        (error_reading.traceback_of, Slow),
        (error_reading.is_printable, Slow),
    ],
)
def test_a_ctrl_c_while_an_exception_is_read_passes(read, kind):
    with pytest.raises(KeyboardInterrupt):
        read(kind())


def test_an_exception_without_a_cause_follows_the_one_that_was_handled():
    first, second = ValueError(), KeyError()
    second.__context__ = first
    assert error_reading.following(second) is first


def test_python_prints_each_exception_that_lets_its_fields_be_read():
    assert error_reading.is_printable(ValueError("readable")) is True
    assert error_reading.is_printable(hostile_tasks.NoChain()) is False
