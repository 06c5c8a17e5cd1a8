"""django-pghistory: its execute wrapper puts two ``SELECT set_config`` before each statement that may fire a trigger.

It goes by how the statement begins: ``SELECT``, ``VACUUM`` and the like are not changed, because after another
statement of the same message they would fail or return nothing. A comment in front hides the beginning. The two values
are parameters, so that from then on a percent sign in a statement without parameters of its own stands for one. The
wrapper is Django's list's last entry at the end of the block, or another one is taken off in its place.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pghistory
import pytest
from django.db import connection, transaction
from django.test import Client
from pghistory.runtime import _inject_history_context

from django_pglock import Unique, enqueue_many, lock, lock_all, task, try_lock
from django_pglock.models import Task
from qa.foreign.sample.tasks import nothing
from qa.foreign.tracked.models import Account


@task(unique=Unique("{text}", on_conflict="replace"))
def say_last(text: str, number: int) -> None:
    """Do nothing."""


@task
def deposit(pk: int, reason: str) -> None:
    with pghistory.context(reason=reason), lock("accounts", pk):
        Account.objects.filter(pk=pk).update(balance=100)


@pytest.fixture
def account() -> Account:
    return Account.objects.create()


@pytest.fixture(autouse=True)
def wrappers():
    """Fail if a test leaves other wrappers on the connection."""
    connection.ensure_connection()
    before = [*connection.execute_wrappers]
    yield
    assert connection.execute_wrappers == before


def last_metadata(account: Account) -> Any:
    """Return what the last event of the account says about its context, or None."""
    event = account.events.order_by("-pgh_id").first()
    return event.pgh_context and event.pgh_context.metadata


def change(account: Account) -> None:
    Account.objects.filter(pk=account.pk).update(balance=account.events.count())


ORDERS = ["context lock", "lock context", "context lock lock", "lock context lock", "lock lock context"]


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_the_context_is_written_in_any_order_of_blocks(account, order, in_transaction):
    with ExitStack() as blocks:
        if in_transaction:
            blocks.enter_context(transaction.atomic())
        for number, kind in enumerate(order.split()):
            blocks.enter_context(lock("block", number) if kind == "lock" else pghistory.context(order=order))
        change(account)
    assert last_metadata(account) == {"order": order}
    change(account)
    assert last_metadata(account) is None


def test_every_kind_of_lock_works_in_a_context_of_pghistory():
    with pghistory.context(kind="all"):
        with lock("100%"), lock("%s and %(name)s", timeout=1), lock_all("a%", "b"):
            pass
        with try_lock("session") as held:
            assert held
        with transaction.atomic(), lock("100%", timeout=1), lock("another", timeout=1, max_hold=30):
            assert Account.objects.count() >= 0


def test_every_kind_of_call_works_in_a_context_of_pghistory(drain):
    text = "100% of %s, %(name)s and 'quoted'"
    with pghistory.context(kind="calls"), lock("50%"):
        results = [nothing.enqueue(text, text=text), nothing.using(priority=5).enqueue(text)]
        assert len(enqueue_many(nothing, [{"text": text}, {"text": text}])) == 2
        say_last.enqueue(text, 1)
        say_last.enqueue(text, 2)
        with transaction.atomic():
            results.append(nothing.enqueue(text))
    assert Task.objects.get(pk=results[0].id).kwargs == {"text": text}
    assert Task.objects.count() == 6
    drain()
    assert {*Task.objects.values_list("status", flat=True)} == {"SUCCESSFUL"}


def test_a_task_has_a_context_of_its_own(account, drain):
    with pghistory.context(reason="the caller's"):
        deposit.enqueue(account.pk, "the task's")
    drain()
    assert last_metadata(account) == {"reason": "the task's"}


def test_requests_through_the_middleware_of_pghistory_keep_their_context(account):
    client = Client()
    for number in range(1, 4):
        assert client.post(f"/pay/{account.pk}/").status_code == 200
        account.refresh_from_db()
        assert account.balance == number
        assert last_metadata(account) == {"user": None, "url": f"/pay/{account.pk}/"}
        # A streamed response ends after the middleware has, and with it the view's lock.
        response = client.get("/export/")
        lines = b"".join(response.streaming_content).decode().split()
        response.close()
        assert len(lines) == Account.objects.count()
        assert _inject_history_context not in connection.execute_wrappers
    change(account)
    assert last_metadata(account) is None
    assert Task.objects.count() == 3
