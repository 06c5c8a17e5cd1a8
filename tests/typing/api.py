"""Typical code of users. It is only type-checked, never run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.tasks import TaskContext
from typing_extensions import assert_type

from django_pglock import (
    Exponential,
    LockNotAvailable,
    lock,
    lock_all,
    lock_view,
    semaphore,
    task,
    try_lock,
)
from django_pglock import (
    TaskContext as OurTaskContext,
)


@task
def send(order_id: int, *, copy: bool = False) -> str:
    return f"{order_id} {copy}"


@task(max_attempts=3, backoff=Exponential(base=2), retry_on=ConnectionError, atomic=True)
def book(amount: int) -> None: ...


@task(takes_context=True, queue_name="mail")
def tell(context: TaskContext[Any, Any], name: str) -> int:
    return context.attempt


@task(takes_context=True, timeout=timedelta(minutes=1))
def rebuild(context: OurTaskContext, pages: int) -> int:
    context.check()
    context.progress(1, pages)
    return context.fencing_token


assert_type(rebuild.enqueue(pages=3).return_value, int)
result = send.enqueue(1, copy=True)
assert_type(result.return_value, str)
assert_type(tell.enqueue("x").return_value, int)
book.using(run_after=timedelta(minutes=5), max_attempts=2).enqueue(amount=5)


@lock("sync:{shop_id}", timeout=timedelta(seconds=2), on_busy="skip")
def sync(shop_id: int) -> str:
    return str(shop_id)


assert_type(sync(1), str)


@lock_view("checkout:{request.user.pk}", methods=["POST"])
def checkout(request: HttpRequest, cart: str) -> HttpResponse:
    return HttpResponse(cart)


@lock("sync:{shop_id}", on_busy="skip")
async def sync_async(shop_id: int) -> str:
    async with lock("x") as handle, lock_all("a", ("b", 1)) as all_of_them:
        assert_type(handle.waited, float)
        assert_type(all_of_them.keys, tuple[int, ...])
    return str(shop_id)


async def use_async() -> None:
    assert_type(await sync_async(1), str)
    await (await lock("x", max_hold=30).aacquire()).release()


def use() -> None:
    with semaphore("render", limit=3) as slot:
        assert_type(slot.name, str)
    with lock("report", 5, shared=True) as handle:
        assert_type(handle.waited, float)
    with try_lock("report") as held:
        if held:
            held.assert_held()
    try:
        lock("x").acquire().release()
    except LockNotAvailable as busy:
        assert_type(busy.name, "str | None")
