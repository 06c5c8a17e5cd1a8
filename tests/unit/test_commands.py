"""Command lines: arguments that are refused, and what is printed on a terminal with a poor encoding."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys

import pytest
from django.core.management import load_command_class
from django.utils.translation import override

from django_pglock.management.arguments import number
from django_pglock.management.terminal import duration_text


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("text", ["0", "-1", "1000001", "", "x", "²", "9" * 5000, "nan", "inf"])
def test_a_text_that_is_no_number_within_the_limits_is_refused_with_the_limits(kind, text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a number from 1 to 1000000$"):
        number(kind, 1, 1_000_000)(text)


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("1000000", 10**6)])
def test_the_limits_of_a_number_are_allowed(text, value):
    assert number(int, 1, 1_000_000)(text) == value


# What the commands print if the terminal has a poor encoding.


@pytest.mark.parametrize("name", ["locks", "locktasks", "runlockworker", "withlock"])
def test_a_character_that_the_encoding_does_not_have_is_printed_as_an_escape(name, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with override("fr"), pytest.raises(SystemExit) as ended:
        load_command_class("django_pglock", name).run_from_argv(["manage.py", name, "--help"])
    sys.stdout.flush()
    assert ended.value.code == 0
    assert rb"\xe9" in sys.stdout.buffer.getvalue()


def test_a_command_prints_where_a_pipe_has_replaced_a_file(monkeypatch, tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        print("before", file=stream, flush=True)
        reader, writer = os.pipe()
        os.dup2(writer, stream.fileno())
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            load_command_class("django_pglock", "locks").run_from_argv(["manage.py", "locks", "--help"])
        stream.flush()
    os.close(writer)
    assert ended.value.code == 0
    with open(reader) as printed:
        assert printed.read().startswith("usage:")


PROGRAM = """
from django_pglock.management.terminal import ignore_broken_pipe

@ignore_broken_pipe()
def show():
    for number in range(lines):
        print("a line of a table", number)

show()
"""


@pytest.mark.parametrize("lines", [10, 100_000], ids=["less than a pipe holds", "more than a pipe holds"])
def test_a_reader_that_ends_early_causes_no_error(lines):
    """``locktasks list | head`` printed a traceback, and so did Python at its end."""
    program = f"lines = {lines}\nimport sys\nsys.stdin.read()\n{PROGRAM}"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate("")
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "-3 s"), (0.4, "0 s"), (119, "119 s"), (120, "2 minutes"), (36_427, "10 hours, 7 minutes")],
)
def test_long_times_are_not_in_seconds(seconds, text):
    assert duration_text(seconds) == text
