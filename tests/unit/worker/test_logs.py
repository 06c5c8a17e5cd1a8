"""The log lines of a worker about its claims."""

from __future__ import annotations

import logging

import pytest

from django_pglock.worker.child import logs


class NamedClaim:
    """The fields of a claim that a log line needs."""

    def __str__(self):
        return "Task 7 (shop.send)"

    def log_fields(self):
        return {}


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("TypeError: nothing is in stock", "Task 7 (shop.send) failed: TypeError: nothing is in stock."),
        ("TaskTimeout: It took too long.", "Task 7 (shop.send) failed: TaskTimeout: It took too long."),
        ("Refused: really?", "Task 7 (shop.send) failed: Refused: really?"),
    ],
)
def test_a_line_has_one_full_stop_also_if_it_ends_with_the_sentence_of_an_exception(caplog, said, line):
    logs.log_claim(logging.ERROR, NamedClaim(), "failed: %s", said)
    assert caplog.messages == [line]
