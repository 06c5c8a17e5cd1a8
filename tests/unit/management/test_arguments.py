"""Arguments of command lines: a wrong one is refused with a sentence that says what it may be."""

from __future__ import annotations

import argparse

import pytest

from django_pglock.management.arguments import positive, read_by
from django_pglock.worker.options import up_to


def read(kind, text):
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=kind)
    return parser.parse_args([f"--number={text}"]).number


@pytest.mark.parametrize("text", ["0", "-1", "1000001", "1.5", "", " 1", "x", "²", "9" * 5000])
def test_a_number_of_rows_that_cannot_be_one_is_refused_with_the_range(text, capsys):
    with pytest.raises(SystemExit):
        read(positive, text)
    assert "is not a number from 1 to 1,000,000" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("1000000", 10**6)])
def test_a_number_of_rows_has_the_limits_of_its_message(text, number):
    assert read(positive, text) == number


def test_the_message_of_a_value_error_is_shown():
    """argparse itself shows only the name of the function."""
    with pytest.raises(argparse.ArgumentTypeError, match="'4' is not a number from 1 to 3"):
        read_by(up_to(3))("4")
    assert read(read_by(up_to(3)), "3") == 3
