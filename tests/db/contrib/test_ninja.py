"""django-ninja: operations under a lock, and problem details for busy locks."""

from __future__ import annotations

import asyncio

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from ninja import NinjaAPI, Schema

from django_pglock import lock
from django_pglock.contrib.ninja import add_lock_handler, lock_view
from django_pglock.testing import assert_no_locks, hold

pytestmark = pytest.mark.django_db(transaction=True)
api = NinjaAPI(urls_namespace="django_pglock_tests")
add_lock_handler(api)


class Card(Schema):
    number: str


@api.post("/pay/{order_id}")
@lock_view("pay:{order_id}")
def pay(request, order_id: int, card: Card):
    return {"paid": order_id, "card": card.number}


@api.get("/deep")
def deep(request):
    with lock("deep", timeout=0):
        return {"read": True}


@api.get("/async/{name}")
@lock_view("async:{name}")
async def from_coroutine(request, name: str):
    return {"name": name}


urlpatterns = [path("api/", api.urls)]


@override_settings(ROOT_URLCONF=__name__)
def test_locked_operations_keep_their_signature_and_answer_busy_with_a_problem():
    def post():
        return Client().post("/api/pay/5", {"number": "4711"}, content_type="application/json")

    assert post().json() == {"paid": 5, "card": "4711"}
    with hold("pay:5"):
        answer = post()
    assert (answer.status_code, answer["Retry-After"]) == (409, "1")
    assert answer["Content-Type"] == "application/problem+json"
    assert answer.json()["title"] == "Conflict"
    assert Client().post("/api/pay/x", {}, content_type="application/json").status_code == 422
    assert_no_locks()


@override_settings(ROOT_URLCONF=__name__)
def test_a_busy_lock_inside_an_operation_is_answered_with_a_problem_document():
    with hold("deep"):
        answer = Client().get("/api/deep")
    assert (answer.status_code, answer["Content-Type"]) == (409, "application/problem+json")
    assert Client().get("/api/deep").json() == {"read": True}


@override_settings(ROOT_URLCONF=__name__)
def test_a_busy_lock_of_an_async_operation_is_answered_with_409():
    async def main():
        assert (await AsyncClient().get("/api/async/a")).json() == {"name": "a"}
        try:
            return await AsyncClient().get("/api/async/b")
        finally:
            await sync_to_async(connections.close_all)()

    with hold("async:b"):
        assert asyncio.run(main()).status_code == 409
