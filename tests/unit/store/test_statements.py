"""The columns of a claim are the fields of ``Claim``, in their order."""

from __future__ import annotations

from dataclasses import fields

from django_pglock.store.statements import CLAIM_COLUMNS, DATES, claim_columns
from django_pglock.tasks.claim import Claim


def test_the_columns_are_the_fields_of_a_claim():
    names = [each.name for each in fields(Claim)]
    assert names[:3] == ["id", "attempt", "worker"]
    assert set(DATES) < set(CLAIM_COLUMNS)
    assert ["id", "attempts", *names[3 : len(CLAIM_COLUMNS) + 1]] == list(CLAIM_COLUMNS)


def test_dates_are_seconds_and_the_start_of_a_first_claim_is_left_out():
    columns = claim_columns('"{}"'.format, "task.").split(", ")
    text = claim_columns('"{}"'.format, "task.")
    assert columns[:2] == ['task."id"', 'task."attempts"']
    for date in DATES:
        assert f'task."{date}"' in text
    assert text.count("date_part('epoch', ") == len(DATES)
    assert """date_part('epoch', NULLIF(task."started_at", task."last_attempted_at"))::text""" in text
