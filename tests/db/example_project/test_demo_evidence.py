"""The checks of the demo: a planted violation in the tables fails its own claim, and no other one."""

from __future__ import annotations

from io import StringIO
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.db.models.functions import Now

from django_pglock.models import Task
from django_pglock.testing import hold
from example_project.demo import evidence
from example_project.demo.scenario import Report
from example_project.demo.screen import Screen
from example_project.shop.management.commands import demo
from example_project.shop.models import CreditEntry, Effect, Order, Product, Receipt

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def expected_effects():
    evidence.expect("plain", range(2))
    evidence.expect("atomic", range(1))
    yield
    evidence.reset()


@pytest.fixture
def valid_records(expected_effects):
    user = User.objects.create_user("ann")
    CreditEntry.objects.create(user=user, amount=50, reason="gift")
    charge = CreditEntry.objects.create(user=user, amount=-30, reason="A book about locks")
    product = Product.objects.create(name="A book about locks", price=30)
    order = Order.objects.create(user=user, product=product, cart=uuid4(), charge=charge)
    Receipt.objects.create(order=order)
    for kind, number in (("plain", 0), ("plain", 1), ("plain", 1), ("atomic", 0)):
        Effect.objects.create(kind=kind, number=number, pid=1)
    Task.objects.create(queue="default", backend="default", task_path="x", status="SUCCESSFUL", finished_at=Now())
    return user


def broken():
    return [finding.claim for finding in evidence.collect() if not finding.holds]


def test_the_demo_finds_no_violation_in_correct_records(valid_records):
    """A task without atomic=True may run twice: the promise is at least once."""
    assert broken() == []
    assert len(evidence.collect()) == len(evidence.CLAIMS)


def failed_task(user):
    Task.objects.create(queue="default", backend="default", task_path="x", status="FAILED", finished_at=Now())


def lost_effect(user):
    Effect.objects.filter(kind="plain", number=0).delete()


def doubled_effect(user):
    Effect.objects.create(kind="atomic", number=0, pid=2)


def double_charge(user):
    CreditEntry.objects.create(user=user, amount=-5, reason="A book about locks")


def negative_balance(user):
    CreditEntry.objects.create(user=user, amount=-100, reason="credit")
    CreditEntry.objects.create(user=user, amount=100, reason="paid back, but it was below zero")


def lost_receipt(user):
    Receipt.objects.all().delete()


@pytest.mark.parametrize(
    ("violate", "claim"),
    [
        (failed_task, "Every task ended successfully"),
        (lost_effect, "Every task has its effect"),
        (doubled_effect, "No atomic task had its effect twice"),
        (double_charge, "No cart was charged twice"),
        (negative_balance, "No balance was ever below zero"),
        (lost_receipt, "Every order has its receipt"),
    ],
)
def test_each_violation_is_found_under_its_claim(valid_records, violate, claim):
    violate(valid_records)
    assert broken() == [claim]


def test_a_lock_that_was_left_behind_is_found(valid_records):
    with hold("forgotten"):
        assert broken() == ["No lock was left behind"]


def test_a_violation_is_shown_and_is_a_nonzero_exit(valid_records, monkeypatch):
    report = Report(findings=[evidence.Finding("The moon is cheese", 3)])
    shown = StringIO()
    demo.show(Screen(shown), report)
    assert "✗ The moon is cheese  (3 violations)" in shown.getvalue()

    monkeypatch.setattr(demo.Scenario, "run", lambda self: report)
    with pytest.raises(CommandError, match="does not hold"):
        demo.Command(stdout=StringIO()).handle(no_serve=True, json=False, no_color=True, erase=True)
