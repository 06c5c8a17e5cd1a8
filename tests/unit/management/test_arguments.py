"""Arguments of command lines: a wrong one is refused with a sentence that says what it may be."""

from __future__ import annotations

import argparse

import pytest

from django_pglock.management.arguments import number, read_by
from django_pglock.worker.options import up_to


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("text", ["0", "-1", "1000001", "", "x", "²", "9" * 5000, "nan", "inf"])
def test_a_text_that_is_no_number_within_the_limits_is_refused_with_the_limits(kind, text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a number from 1 to 1000000$"):
        number(kind, 1, 1_000_000)(text)


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("1000000", 10**6)])
def test_the_limits_of_a_number_are_allowed(text, value):
    assert number(int, 1, 1_000_000)(text) == value


def test_the_message_of_a_value_error_is_shown():
    """argparse itself shows only the name of the function."""
    with pytest.raises(argparse.ArgumentTypeError, match="'4' is not a number from 1 to 3"):
        read_by(up_to(3))("4")
    assert read_by(up_to(3))("3") == 3
