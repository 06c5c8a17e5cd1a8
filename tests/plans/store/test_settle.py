"""Outcomes are written into rows that are found by their ids."""

from __future__ import annotations

from django_pglock.store.settle import (
    FINISH_DATES,
    LOCKED_BY_OTHERS,
    SETTLE_OTHERS,
    SETTLE_OWN_SUCCESS,
    SETTLE_SUCCESSES,
    SETTLE_UNOBSERVED,
)
from django_pglock.store.statements import filled
from tests.plans.reading import reads
from tests.plans.store.backlog import Call


def calls(backlog):
    ids, ones, texts = backlog.ids, backlog.ones, backlog.texts
    failed = ["FAILED"] * len(ids)
    others = (ids, ones, failed, [0.0] * len(ids), ones, ones, ones, failed, texts, texts, ids, texts)
    many = [*ids, *range(ids[-1] + 10_000_000, ids[-1] + 10_000_490)]
    return {
        "SETTLE_SUCCESSES": Call(filled(SETTLE_SUCCESSES), (ids, ones, "[]")),
        "SETTLE_SUCCESSES, many": Call(filled(SETTLE_SUCCESSES), (many, [1] * len(many), "[]")),
        "SETTLE_UNOBSERVED": Call(filled(SETTLE_UNOBSERVED), (ids, ones, "[]", len(ids))),
        "SETTLE_UNOBSERVED, many": Call(filled(SETTLE_UNOBSERVED), (many, [1] * len(many), "[]", len(many))),
        "SETTLE_OWN_SUCCESS": Call(filled(SETTLE_OWN_SUCCESS), ("null", ids[0], 1)),
        "SETTLE_OTHERS": Call(filled(SETTLE_OTHERS), (*others, backlog.worker)),
        "LOCKED_BY_OTHERS": Call(filled(LOCKED_BY_OTHERS), (ids, ones)),
        "FINISH_DATES": Call(filled(FINISH_DATES), [backlog.array]),
    }


def test_a_settle_finds_its_rows_by_key(plans):
    plans.check(pages=2000)
    for name, plan in plans.items():
        assert "Seq Scan" not in {kind for kind, _ in reads(plan)}, name
