"""Typical code of users. It is only type-checked, never run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from django.contrib.auth.models import User
from django.db.models import F
from django.http import HttpRequest, HttpResponse
from django.tasks import TaskContext, TaskResult
from typing_extensions import assert_type

from django_pglock import (
    Calls,
    ClaimQuerySet,
    Exponential,
    Group,
    Lease,
    LockNotAvailable,
    enqueue_many,
    leader,
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
from django_pglock.testing import enqueued, make_context, patch_enqueue, run_steps, run_tasks

P = ParamSpec("P")
R = TypeVar("R")


@task
def send(order_id: int, *, copy: bool = False) -> str:
    return f"{order_id} {copy}"


@task(max_attempts=3, backoff=Exponential(base=2), retry_on=ConnectionError, atomic=True)
def book(amount: int) -> None: ...


@task(lock="stock:{item_id}", advisory=True)
def recount(item_id: int) -> None: ...


@task(takes_context=True, queue_name="mail")
def tell(context: TaskContext[Any, Any], name: str) -> int:
    return context.attempt


@task(takes_context=True, timeout=timedelta(minutes=1))
def rebuild(context: OurTaskContext, pages: int) -> int:
    context.check()
    context.progress(1, pages)
    return context.fencing_token


@task
async def fetch(url: str) -> bytes:
    return url.encode()


@task(timeout=5)
async def fetch_soon(url: str) -> bytes | None:
    return url.encode() or None


@task(takes_context=True)
async def fetch_politely(context: OurTaskContext, url: str) -> list[bytes]:
    context.check()
    return [url.encode()]


@task(takes_context=True)
def fetch_all(context: OurTaskContext, orders: list[int]) -> int:
    texts = context.gather("send", (send.using(priority=5).call_of(each, copy=True) for each in orders))
    assert_type(texts[0].return_value, str)
    context.gather("wrong", [send.call_of("1")])  # type: ignore[arg-type]
    context.gather("enqueued", [send.enqueue(1)])  # type: ignore[arg-type]
    return len(texts)


@task(takes_context=True)
async def fetch_them(context: OurTaskContext, urls: list[str]) -> list[bytes]:
    pages = await context.agather("fetch", [fetch.call_of(url) for url in urls])
    return [each.return_value for each in pages]


@task(group=Group("digest:{user_id}", limit=500, gather=30))
def send_digest(calls: Calls) -> str:
    for call in calls:
        with calls.each(call):
            calls.fail(call, ValueError())
    return f"{len(calls)} news for user {calls[0]['user_id']}"


@task(group="digest:{user_id}", takes_context=True, max_attempts=2)
async def send_digest_async(context: OurTaskContext, calls: list[dict[str, int]]) -> int:
    return len(calls) + context.attempt


@task(cron="0 7 * * mon-fri", timezone="Europe/Paris", timeout=300, group=None)
def send_report() -> None: ...


assert_type(rebuild.enqueue(pages=3).return_value, int)
result = send.enqueue(1, copy=True)
assert_type(result.return_value, str)
assert_type(result.wait(10).return_value, str)
assert_type(send.get_result(result.id).wait().return_value, str)
assert_type(tell.enqueue("x").return_value, int)
book.using(run_after=timedelta(minutes=5), max_attempts=2).enqueue(amount=5)
book.using(after=[result, result.id], after_ended=result).enqueue_on_commit(amount=5)
send_report.enqueue()
enqueue_many(send.using(priority=-5), ({"order_id": number} for number in range(1000)))

assert_type(fetch.enqueue("https://example.org").wait(10).return_value, bytes)
assert_type(fetch_soon.using(priority=5).enqueue(url="x").return_value, "bytes | None")
assert_type(fetch_politely.enqueue("x").return_value, list[bytes])
assert_type(fetch.call("x"), bytes)
assert_type(send_digest.enqueue(user_id=1, text="Anna likes your picture").return_value, str)
assert_type(send_digest_async.using(priority=5).enqueue(user_id=1).wait().return_value, int)

send.enqueue("1")  # type: ignore[arg-type]
fetch.enqueue(order_id=1)  # type: ignore[call-arg]
rebuild.enqueue()  # type: ignore[call-arg]
task(max_attemps=3)  # type: ignore[call-overload]


def wait_for_any(results: list[TaskResult[..., str]]) -> None: ...


wait_for_any([result, send.enqueue(2)])


@lock("sync:{shop_id}", timeout=timedelta(seconds=2), on_busy="skip")
def sync(shop_id: int) -> str:
    return str(shop_id)


assert_type(sync(1), "str | None")
sync("1")  # type: ignore[arg-type]


@lock_all("shop:{shop_id}", "stock:{shop_id}", timeout=2, on_busy="skip")
def count(shop_id: int) -> int:
    return shop_id


@semaphore("render", limit=3, on_busy="skip")
def render(page: int) -> str:
    return str(page)


@lock("post:{number}", scope="transaction")
def post(number: int) -> str:
    return str(number)


@lock("post:{number}", timeout=0, on_busy=lambda busy, number: f"{busy.name} is busy")
def post_or_say(number: int) -> str:
    return str(number)


@lock("shop:{shop_id}", on_busy="raise", max_hold=30)
async def close(shop_id: int) -> str:
    return str(shop_id)


assert_type(count(1), "int | None")
assert_type(render(1), "str | None")
assert_type(post(1), str)
assert_type(post_or_say(1), str)


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
    assert_type(await sync_async(1), "str | None")
    assert_type(await close(1), str)
    result = await fetch.aenqueue("https://example.org")
    assert_type((await result.await_(10)).return_value, bytes)
    assert_type((await (await send.aget_result(result.id)).await_()).return_value, str)
    assert_type(await fetch.acall("x"), bytes)
    await (await lock("x", max_hold=30).aacquire()).release()
    async with Lease("nightly", ttl=60) as lease:
        assert_type(lease.token, int)
        await lease.extend()
        await lease.until_lost()


def use() -> None:
    with lock("report", timeout=2) as handle:
        handle.assert_held()
    with semaphore("render", limit=3) as slot:
        assert_type(slot.name, str)
    with lock("report", 5, shared=True) as handle:
        assert_type(handle.waited, float)
    with try_lock("report") as held:
        if held:
            held.assert_held()
    with Lease("nightly", ttl=60, min_hold=10) as lease:
        fence: int = lease.token
        lease.extend(fence)
    with leader("scheduler", ttl=15) as leadership:
        if not leadership.lost.wait(1):
            fence = leadership.token
    fence = Lease("nightly", ttl=timedelta(minutes=1)).acquire().token
    try:
        lock("x").acquire().release()
    except LockNotAvailable as busy:
        assert_type(busy.name, "str | None")


def run_enqueued_tasks() -> None:
    for run in run_tasks("mail", until="due", raise_errors=True):
        assert_type(run.outcome, str)
        assert_type(run.exception, "BaseException | None")
    run_tasks(until="never")  # type: ignore[arg-type]


def see_what_is_enqueued() -> None:
    with enqueued(send) as calls, enqueued(), patch_enqueue("shop.tasks.rebuild") as mocked:
        send.enqueue(1)
        mocked.assert_not_called()
    assert_type(calls[0].options, dict[str, Any])
    assert_type(make_context(send.using(meta={"trace": 1}), attempt=2), OurTaskContext)


def reported(function: Callable[P, R]) -> Callable[Concatenate[OurTaskContext, P], R]:
    """A hook around a function, which takes the context for it."""

    @wraps(function)
    def inner(context: OurTaskContext, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    return inner


@task(takes_context=True)
@reported
def hooked(order_id: int) -> str:
    return str(order_id)


def call_a_hooked_function() -> None:
    assert_type(hooked.call(1), str)
    hooked.enqueue("one")  # type: ignore[arg-type]


def run_a_function_with_steps() -> None:
    run = run_steps(rebuild, 3, events={"packed": 1}, fail={"charge": ConnectionError()}, interrupt_after="book")
    assert_type(run.return_value, int)
    assert_type(run.steps["charge"], Any)


def claim_rows(users: ClaimQuerySet[User]) -> None:
    with users.claim(10) as rows:
        assert_type(rows[0], User)
    assert_type(users.claim_update(10, is_staff=True), list[User])
    assert_type(users.claim_update(None, last_name="taken", attempts=F("attempts") + 1), list[User])


def a_name_that_is_not_there() -> None:
    """A typo is an error of the type checker, not a name of any type."""
    from django_pglock import lok  # type: ignore[attr-defined]

    del lok
