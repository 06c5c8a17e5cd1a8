"""Credits for money: the provider charges once and pays back once, also if the process that calls it is killed."""

from __future__ import annotations

import os
import signal
from uuid import uuid4

import pytest
from django.db import connection, transaction

from django_pglock import lock_table
from django_pglock.models import Task, Worker
from example_project.systems.harness import call
from example_project.systems.ledger.models import Entry
from qa.systems.ledger.command import run
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)


CUT_OFF = """
SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE relation = 'ledger_entry'::regclass AND NOT granted
"""


@pytest.fixture
def workers(fleet, site):
    """Start worker processes."""

    def start(count):
        url = site.fleet.environment["PAYMENTS_URL"]
        for _ in range(count):
            fleet.start("runlockworker", "--threads=2", "--no-reload", PAYMENTS_URL=url)

    return start


@pytest.fixture
def book(site):
    """What the provider has done for a holder or an entry, by the end of the key."""
    return lambda part: [(each["kind"], each["requests"]) for each in site.provider.book() if part in each["key"]]


def expect_credits_once(name, book, eventually):
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists())
    [(kind, requests)] = book(name)
    assert kind == "charge"
    assert requests >= 2, "a slow machine may have a third attempt"
    assert list(Entry.objects.values_list("holder", "amount")) == [(name, 50)]


def test_a_worker_that_is_killed_behind_the_charge_charges_once(site, holder, workers, book, eventually):
    """The charge is done, and its answer held back until the worker is dead. Another worker runs the task again."""
    ann = holder("ann")
    workers(2)
    site.provider.post("/hold")
    try:
        assert ann.order("buy", 50).status == 202
        eventually(lambda: book("ann"))
        os.kill(Worker.objects.get(pk=Task.objects.get().worker).pid, signal.SIGKILL)
        assert not Entry.objects.exists()
    finally:
        site.provider.post("/release")
    expect_credits_once("ann", book, eventually)


def test_a_rollback_behind_the_charge_leaves_it_for_the_next_attempt(holder, workers, book, eventually):
    """The entry has to wait, because the table is locked. Then its session is ended, and the attempt rolled back."""
    bob = holder("bob")
    workers(1)
    with transaction.atomic(), connection.cursor() as cursor:
        lock_table(Entry, mode="EXCLUSIVE")
        assert bob.order("buy", 50).status == 202

        def cut_off():
            cursor.execute(CUT_OFF)
            return cursor.fetchone() == (1,)

        eventually(cut_off)
    expect_credits_once("bob", book, eventually)


def test_an_order_that_is_sent_twice_is_charged_once(holder, workers, book, eventually):
    cleo, key = holder("cleo"), "2f0c1f2e-6a0e-4a1c-9d51-0f6a4f1c2d3e"
    assert [cleo.order("buy", 50, key).status for _ in range(2)] == [202, 202]
    workers(1)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 2)
    assert [kind for kind, _ in book("cleo")] == ["charge"]
    assert cleo.balance == 50


def test_a_refund_is_paid_back_once_and_only_for_credits_that_are_there(holder, workers, book, eventually):
    dan = holder("dan")
    first, second = dan.gets(50), dan.gets(50)
    assert dan.order("use", 30).status == 201
    path = f"/systems/ledger/dan/refund/{first.pk}/"
    assert {answer.status for answer in dan.post_at_once(4, path)} <= {201, 409}
    assert dan.refund(first).status == 201, "again, it is the same refund"
    assert dan.refund(second).status == 402, "20 are left"
    assert dan.balance == 20
    workers(1)
    eventually(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists())
    assert [kind for kind, _ in book(f"refund of {first.pk}")] == ["refund"]
    assert book(f"refund of {second.pk}") == []
    assert holder("eve").refund(second).status == 404, "somebody else's"


# Requests of holders behind two processes: races, repeated requests, busy answers.


def test_a_request_that_is_repeated_uses_credits_once(holder):
    """The lock is free again. It is the key that says that it is the same request."""
    ann, key = holder("ann"), uuid4()
    ann.gets(100)
    answers = [ann.order("use", 30, key) for _ in range(3)]
    assert [(answer.status, answer.content) for answer in answers] == [(201, {"balance": 70})] * 3
    assert ann.order("use", 40, key).content == {"balance": 70}, "another amount with the same key uses none"
    assert ann.balance == 70


# ``manage.py systems ledger`` runs, and what it claims holds.


def test_the_command_of_the_ledger_finds_no_violation(fleet):
    """In a process of its own, as users run it. The other scenarios run in the process of their test."""
    process = call(fleet, run)
    assert process.wait(2 * NEVER) == 0, fleet.output()
    assert "✓" in fleet.output()
    assert "✗" not in fleet.output()
