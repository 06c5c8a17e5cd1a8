"""``lock_view`` and the middleware in Django REST framework and in django-ninja, which need no adapter."""

from __future__ import annotations

import asyncio

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import AsyncClient, Client, override_settings
from django.urls import include, path
from ninja import NinjaAPI, Schema
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import action, api_view, authentication_classes
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.test import APIClient
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_pglock import lock, lock_view
from django_pglock.errors import ConfigurationError
from django_pglock.testing import assert_no_locks, hold

pytestmark = pytest.mark.django_db(transaction=True)
api = NinjaAPI(urls_namespace="django_pglock_tests")


class User:
    pk = 7
    is_authenticated = True


class Token(BaseAuthentication):
    """Authenticates by a header, which Django's own middleware does not."""

    def authenticate(self, request):
        return (User(), None) if request.headers.get("Authorization") else None


class Checkout(APIView):
    authentication_classes = [Token]

    @lock_view("checkout:{request.user.pk}", status=423, retry_after=3)
    def post(self, request):
        return Response({"paid": True})

    def get(self, request):
        with lock("deep", timeout=0):
            return Response({"read": True})


@api_view(["POST"])
@authentication_classes([Token])
@lock_view("order:{order_id}:{request.user.pk}")
def pay(request, order_id):
    return Response({"paid": order_id})


class Orders(ViewSet):
    authentication_classes = [Token]

    @lock_view("order:{pk}")
    @action(detail=True, methods=["post"])
    def ship(self, request, pk):
        return Response({"shipped": pk})

    @lock_view("orders")
    def create(self, request):
        return Response({"created": True})


class Card(Schema):
    number: str


@api.post("/pay/{order_id}")
@lock_view("pay:{order_id}")
def pay_by_card(request, order_id: int, card: Card):
    return {"paid": order_id, "card": card.number}


@api.get("/deep")
def deep(request):
    with lock("deep", timeout=0):
        return {"read": True}


@api.get("/async/{name}")
@lock_view("async:{name}")
async def from_coroutine(request, name: str):
    return {"name": name}


router = SimpleRouter()
router.register("orders", Orders, basename="order")
urlpatterns = [
    *(path("checkout", Checkout.as_view()), path("pay/<int:order_id>", pay), path("", include(router.urls))),
    path("api/", api.urls),
]
HERE = override_settings(
    ROOT_URLCONF=__name__, MIDDLEWARE=["django_pglock.middleware.LockNotAvailableMiddleware"], DEBUG=False
)


@pytest.mark.parametrize(
    ("url", "name", "status", "wait"),
    [
        ("/checkout", "checkout:7", 423, "3"),
        ("/pay/5", "order:5:7", 409, "1"),
        ("/orders/5/ship/", "order:5", 409, "1"),
        ("/orders/", "orders", 409, "1"),
        ("/api/pay/05", "pay:5", 409, "1"),
    ],
)
@HERE
def test_the_second_request_to_a_view_of_a_framework_is_answered(url, name, status, wait):
    client = APIClient(HTTP_AUTHORIZATION="Token x", HTTP_ACCEPT="application/json")
    assert client.post(url, {"number": "4711"}, format="json").status_code == 200
    with hold(name):
        answer = client.post(url, {"number": "4711"}, format="json")
    assert (answer.status_code, answer["Retry-After"]) == (status, wait)
    assert answer["Content-Type"] == "application/problem+json"
    assert name not in answer.content.decode()
    assert client.post(url, {"number": "4711"}, format="json").status_code == 200
    assert_no_locks()


@pytest.mark.parametrize("url", ["/checkout", "/api/deep"])
@HERE
def test_a_busy_lock_inside_a_view_of_a_framework_is_answered_by_the_middleware(url):
    with hold("deep"):
        assert Client().get(url).status_code == 409
    assert Client().get(url).json() == {"read": True}


@HERE
def test_a_busy_lock_of_an_async_operation_is_answered_with_409():
    async def main():
        assert (await AsyncClient().get("/api/async/a")).json() == {"name": "a"}
        try:
            return await AsyncClient().get("/api/async/b")
        finally:
            await sync_to_async(connections.close_all)()

    with hold("async:b"):
        assert asyncio.run(main()).status_code == 409


def test_lock_view_refuses_a_class_because_it_has_no_authenticated_user():
    with pytest.raises(ConfigurationError, match="handler methods"):
        lock_view("a")(Checkout)
