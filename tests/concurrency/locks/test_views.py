"""Locked views that are coroutines."""

from __future__ import annotations

import asyncio

import pytest
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, RequestFactory, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from django_pglock import lock_view
from tests.concurrency.locks.sessions import until

pytestmark = pytest.mark.django_db(transaction=True)


#: For the first of several requests: all others have been answered.
answered = None


@lock_view("checkout:{pk}", methods=["POST"])
async def checkout(request, pk):
    await answered.wait()
    return HttpResponse("paid")


@lock_view("stream", on_busy=lambda busy, request: HttpResponse("busy", status=503))
async def stream(request):
    async def pieces():
        for number in range(3):
            await asyncio.sleep(0)
            yield str(number)

    return StreamingHttpResponse(pieces())


@lock_view("class")
class AsyncView(View):
    async def get(self, request):
        return HttpResponse("done")


@lock_view("inherited")
class Base(View):
    """Only a subclass says whether the view is async."""


class AsyncSubclass(Base):
    async def get(self, request):
        return HttpResponse("done")


@method_decorator(lock_view("inherited"), name="dispatch")
class AsyncDispatch(View):
    async def get(self, request):
        return HttpResponse("done")


urlpatterns = [
    path("checkout/<int:pk>", checkout),
    path("stream", stream),
    path("class", AsyncView.as_view()),
    path("async_subclass", AsyncSubclass.as_view()),
    path("async_dispatch", AsyncDispatch.as_view()),
]


@override_settings(ROOT_URLCONF=__name__)
def test_async_views_answer_the_second_of_two_requests(somebody):
    async def main():
        global answered
        client, answered = AsyncClient(), asyncio.Event()
        posts = [asyncio.create_task(client.post("/checkout/7")) for _ in range(5)]

        async def only_one_is_left():
            return sum(post.done() for post in posts) == 4

        await until(only_one_is_left, "the others wait")
        answered.set()
        answers = await asyncio.gather(*posts)
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409, 409]
        assert {answer.headers.get("Retry-After") for answer in answers if answer.status_code == 409} == {"1"}
        assert (await client.get("/class")).content == b"done"
        await asyncio.to_thread(somebody.holds, "class")
        await asyncio.to_thread(somebody.holds, "checkout:7")
        assert (await client.get("/class")).status_code == 409
        assert (await client.get("/checkout/7")).status_code == 200

    asyncio.run(main())


@override_settings(ROOT_URLCONF=__name__)
@pytest.mark.parametrize("url", ["/async_subclass", "/async_dispatch"])
def test_a_decorated_class_or_dispatch_is_locked_if_its_handlers_are_async(somebody, url):
    async def main():
        client = AsyncClient()
        assert (await client.get(url)).content == b"done"
        await asyncio.to_thread(somebody.holds, "inherited")
        assert (await client.get(url)).status_code == 409

    asyncio.run(main())


def test_an_async_stream_holds_its_lock_until_it_is_closed(somebody):
    async def main():
        request = RequestFactory().get("/")
        response = await stream(request)
        assert not await asyncio.to_thread(somebody.can_have, "stream")
        assert (await asyncio.create_task(stream(request))).status_code == 503
        assert b"".join([piece async for piece in response]) == b"012"
        await asyncio.to_thread(response.close)
        assert await asyncio.to_thread(somebody.can_have, "stream")

    asyncio.run(main())
