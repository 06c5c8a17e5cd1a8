"""Django REST framework: locks by user, exceptions and responses."""

from __future__ import annotations

import pytest
from django.db import transaction
from django.test import override_settings
from django.urls import include, path
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import action, api_view, authentication_classes
from rest_framework.renderers import BaseRenderer, JSONRenderer
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.test import APIClient
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_pglock import lock
from django_pglock import lock_view as lock_any_view
from django_pglock.contrib.rest_framework import lock_view
from django_pglock.errors import ConfigurationError
from django_pglock.testing import assert_no_locks, hold
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


class User:
    pk = 7
    is_authenticated = True


class Token(BaseAuthentication):
    """Authenticates by a header, which Django's own middleware does not."""

    def authenticate(self, request):
        return (User(), None) if request.headers.get("Authorization") else None


class Page(BaseRenderer):
    media_type, format = "text/html", "html"

    def render(self, data, accepted_media_type=None, renderer_context=None):
        return "<p>page"


class Checkout(APIView):
    authentication_classes = [Token]
    renderer_classes = [JSONRenderer, Page]

    @lock_view("checkout:{request.user.pk}", status=423, retry_after=3)
    def post(self, request):
        return Response({"paid": True})

    def get(self, request):
        with transaction.atomic():
            Effect.objects.create(name="undone")
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


router = SimpleRouter()
router.register("orders", Orders, basename="order")
urlpatterns = [path("checkout", Checkout.as_view()), path("pay/<int:order_id>", pay), path("", include(router.urls))]
HANDLER = {"EXCEPTION_HANDLER": "django_pglock.contrib.rest_framework.exception_handler"}
CASES = [
    ("/checkout", "checkout:7", 423, "3"),
    ("/pay/5", "order:5:7", 409, "1"),
    ("/orders/5/ship/", "order:5", 409, "1"),
    ("/orders/", "orders", 409, "1"),
]


def client():
    return APIClient(HTTP_AUTHORIZATION="Token x")


@override_settings(ROOT_URLCONF=__name__)
@pytest.mark.parametrize(("url", "name", "status", "wait"), CASES)
@pytest.mark.parametrize("settings_of_drf", [{}, HANDLER])
def test_the_second_request_is_answered_by_the_framework(url, name, status, wait, settings_of_drf):
    with override_settings(REST_FRAMEWORK=settings_of_drf):
        assert client().post(url).status_code == 200
        with hold(name):
            answer = client().post(url)
        assert (answer.status_code, answer["Retry-After"]) == (status, wait)
        assert "being done already" in answer.json()["detail"]
        assert name not in answer.content.decode()
        if settings_of_drf:
            assert answer["Content-Type"] == "application/problem+json"
            assert answer.json()["status"] == status
            assert set(answer.json()) == {"type", "title", "status", "detail"}
        assert client().post(url).status_code == 200
    assert_no_locks()


@override_settings(ROOT_URLCONF=__name__, REST_FRAMEWORK=HANDLER)
def test_a_busy_lock_inside_a_view_is_answered_with_409_and_rolls_back():
    with hold("deep"):
        answer = client().get("/checkout")
    assert (answer.status_code, answer["Content-Type"]) == (409, "application/problem+json")
    assert not Effect.objects.exists()
    assert client().get("/checkout").json() == {"read": True}
    assert client().put("/checkout").status_code == 405, "the rest is left to the framework"


@override_settings(ROOT_URLCONF=__name__, REST_FRAMEWORK=HANDLER)
def test_a_busy_lock_is_answered_to_a_browser_with_an_html_page():
    with hold("deep"):
        answer = client().get("/checkout", HTTP_ACCEPT="text/html")
    assert answer.status_code == 409
    assert answer["Content-Type"].startswith("text/html")


def test_lock_view_refuses_a_class_because_it_has_no_authenticated_user():
    for decorate in (lock_view("a"), lock_any_view("a")):
        with pytest.raises(ConfigurationError, match="handler methods"):
            decorate(Checkout)
    with pytest.raises(ConfigurationError, match="418"):
        lock_view("a", status=418)
    with pytest.raises(ConfigurationError, match="retry_after is -1"):
        lock_view("a", retry_after=-1)


@pytest.mark.parametrize("view", [api_view(["GET"])(lambda request: Response()), Checkout.as_view()])
def test_lock_view_refuses_a_view_of_the_framework_because_no_code_would_answer_its_exception(view):
    with pytest.raises(ConfigurationError, match="below @api_view"):
        lock_view("a")(view)
