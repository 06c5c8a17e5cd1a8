"""The tasks of the shop and of the demo."""

from __future__ import annotations

import os
import time
from datetime import timedelta

from django_pglock import lock, task
from example_project.shop.models import CreditEntry, Effect, Order, Receipt


@task(queue_name="mail", max_attempts=5)
def send_receipt(order_id: int) -> None:
    """Send the receipt of an order. May run twice, as letters cannot be rolled back; the row is written once."""
    Receipt.objects.get_or_create(order=Order.objects.get(pk=order_id))


@task(queue_name="ledger", atomic=True)
def spend(user_id: int, amount: int, reason: str) -> bool:
    """Spend credits if there are enough; return whether there were. Happens exactly once, even if the worker dies."""
    with lock("ledger", user_id):
        if CreditEntry.objects.balance_of(user_id) < amount:
            return False
        CreditEntry.objects.create(user_id=user_id, amount=-amount, reason=reason)
    return True


def leave_effect(kind: str, number: int) -> None:
    """Write down that a task of the demo has run."""
    Effect.objects.create(kind=kind, number=number, pid=os.getpid())


@task
def count(number: int) -> None:
    """Leave an effect: at least once."""
    leave_effect("plain", number)


@task(atomic=True)
def count_once(number: int) -> None:
    """Leave an effect: exactly once."""
    leave_effect("atomic", number)


@task(atomic=True)
def count_slowly(number: int, seconds: float) -> None:
    """Leave an effect exactly once, slowly enough to be killed in the middle."""
    leave_effect("slow", number)
    time.sleep(seconds)


@task(takes_context=True, max_attempts=3, backoff=0.1)
def count_with_luck(context, number: int) -> None:
    """Fail at first, then leave an effect."""
    if context.attempt == 1:
        raise ConnectionError("the first attempt always fails")
    leave_effect("retried", number)


@task(takes_context=True)
def process_order(context, user_id: int, number: int) -> dict[str, int]:
    """Process an order in steps. However often the worker dies, the card is charged once and the order shipped once."""
    context.atomic_step("charge", charge, user_id, number)
    wait_to_be_killed("between", number)
    context.step("reserve", do_until_killed, "reserve", number)
    context.sleep("night", 1)
    parcel = context.wait_for(f"packed:{number}", timeout=300)
    context.step("label", leave_effect, "label", number)
    context.atomic_step("ship", do_until_killed, "ship", number)
    return parcel


@task(takes_context=True)
def follow_up(context, order_id: int) -> None:
    """Say thanks, and ask two weeks later how it was. Meanwhile the task is a row, and nothing else."""
    context.step("thank", leave_effect, "thank", order_id)
    context.atomic_step("note", leave_effect, "note", order_id)
    context.sleep("two weeks", timedelta(days=14))
    context.step("ask", leave_effect, "ask", order_id)


@task(takes_context=True)
def count_together(context, number: int) -> int:
    """Let other tasks count, and continue when all of them have ended. One of them fails, and two take long."""
    context.step("announce", leave_effect, "announce", number)
    calls = [count.call_of(each) for each in range(number)]
    calls += [count_slowly.call_of(each, 600.0) for each in range(2)]
    results = context.gather("count", [*calls, send_receipt.using(max_attempts=1).call_of(order_id=404)])
    return sum(each.status == "SUCCESSFUL" for each in results)


def charge(user_id: int, number: int) -> None:
    """Take the money."""
    CreditEntry.objects.create(user_id=user_id, amount=-30, reason=f"order {number}")
    wait_to_be_killed("charge", number)


def do_until_killed(kind: str, number: int) -> None:
    """Leave an effect, and do not end if the demo is going to kill the worker here."""
    leave_effect(kind, number)
    wait_to_be_killed(kind, number)


def wait_to_be_killed(where: str, number: int) -> None:
    """Take very long, unless the demo has killed a worker here."""
    if not Effect.objects.filter(kind=f"killed {where}", number=number).exists():
        time.sleep(600)
