"""The middleware answers a busy lock, wherever in a view the lock was requested."""

from __future__ import annotations

import asyncio

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.http import HttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path

from django_pglock import lock
from django_pglock.testing import hold

pytestmark = pytest.mark.django_db(transaction=True)


def view(request):
    with lock("deep", timeout=0):
        return HttpResponse("done")


async def async_view(request):
    async with lock("deep", timeout=0):
        return HttpResponse("done")


def broken(request):
    raise ZeroDivisionError


urlpatterns = [path("sync", view), path("async", async_view), path("broken", broken)]
WITH_IT = {"ROOT_URLCONF": __name__, "MIDDLEWARE": ["django_pglock.middleware.LockNotAvailableMiddleware"]}


@override_settings(**WITH_IT)
def test_sync_and_async_views_are_answered():
    async def both(client):
        try:
            return [await client.get("/sync"), await client.get("/async")]
        finally:
            await sync_to_async(connections.close_all)()

    with hold("deep"):
        answers = [Client().get("/sync"), *asyncio.run(both(AsyncClient()))]
    assert [(answer.status_code, answer["Retry-After"]) for answer in answers] == [(409, "1")] * 3
    assert b"deep" not in answers[0].content
    assert Client().get("/sync").content == b"done"
    with pytest.raises(ZeroDivisionError):
        Client().get("/broken")
