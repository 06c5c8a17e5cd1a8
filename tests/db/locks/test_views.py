"""A view with a lock: the second request gets a 409 response."""

from __future__ import annotations

import pickle
import weakref
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import AnonymousUser, User
from django.core.signals import request_finished, request_started
from django.db import transaction
from django.http import HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, RequestFactory, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from django_pglock import LockKeyError, lock_view
from django_pglock.errors import ConfigurationError
from django_pglock.locks import responses

pytestmark = pytest.mark.django_db(transaction=True)


def request_of(pk=1, method="post"):
    request = getattr(RequestFactory(), method)("/")
    request.user = SimpleNamespace(pk=pk)
    return request


@lock_view("checkout:{request.user.pk}")
def checkout(request):
    return HttpResponse("paid")


@lock_view("checkout:{request.user.pk}")
async def checkout_async(request):
    return HttpResponse("paid")


urlpatterns = [path("checkout", checkout_async)]


def test_the_second_request_gets_409_and_when_to_try_again(somebody):
    somebody.holds("checkout:1")
    response = checkout(request_of())
    assert (response.status_code, response["Retry-After"]) == (409, "1")
    assert b"checkout" not in response.content, "the name may hold a user's id"
    assert checkout(request_of(pk=2)).status_code == 200, "other users are not held up"


def test_an_exception_frees_the_lock(somebody):
    @lock_view("a")
    def view(request):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        view(request_of())
    assert somebody.can_have("a")


@pytest.mark.parametrize("status", [423, 429, 503])
def test_lock_view_takes_a_status_or_a_function_for_the_answer_when_busy(somebody, status):
    somebody.holds("a")
    view = lock_view("a", status=status, retry_after=7)(lambda request: HttpResponse())
    assert (view(request_of()).status_code, view(request_of())["Retry-After"]) == (status, "7")
    own = lock_view("a", on_busy=lambda error, request, number: HttpResponse(f"{error.name} {number}", status=202))
    assert own(lambda request, number: HttpResponse())(request_of(), number=5).content == b"a 5"


def say_nothing(error, request):
    return None


async def say_nothing_later(error, request):
    return None


@pytest.mark.parametrize("on_busy", [say_nothing, say_nothing_later])
def test_a_function_for_the_answer_that_returns_none_is_named(somebody, on_busy):
    async def view(request):
        return HttpResponse()

    somebody.holds("a")
    with pytest.raises(ConfigurationError, match=f"the function {on_busy.__name__} of on_busy returned None; let it"):
        async_to_sync(lock_view("a", on_busy=on_busy)(view))(request_of())
    if on_busy is say_nothing:
        with pytest.raises(ConfigurationError, match="the function say_nothing of on_busy returned None"):
            lock_view("a", on_busy=on_busy)(lambda request: HttpResponse())(request_of())


def make_class_views():
    @lock_view("a")
    class Decorated(View):
        def post(self, request):
            return HttpResponse("done")

    @method_decorator(lock_view("a"), name="dispatch")
    class DecoratedDispatch(View):
        def post(self, request):
            return HttpResponse("done")

    class DecoratedMethod(View):
        @lock_view("a")
        def post(self, request):
            return HttpResponse("done")

    @lock_view("a")
    class WithoutHandlers(View):
        pass

    class Subclass(WithoutHandlers):
        def post(self, request):
            return HttpResponse("done")

    return [Decorated, DecoratedDispatch, DecoratedMethod, Subclass]


@pytest.mark.parametrize("view", make_class_views())
def test_class_based_views_in_each_way_to_decorate_them(somebody, view):
    assert view.as_view()(request_of()).content == b"done"
    somebody.holds("a")
    assert view.as_view()(request_of()).status_code == 409


def test_a_streaming_response_holds_the_lock_until_it_is_closed(somebody):
    @lock_view("a")
    def view(request):
        return StreamingHttpResponse(iter([b"one", b"two"]))

    response = view(request_of())
    assert not somebody.can_have("a")
    assert b"".join(response) == b"onetwo"
    assert not somebody.can_have("a")
    response.close()
    assert somebody.can_have("a")
    assert weakref.getweakrefs(response) == [], "no code runs when the response is deleted"


def test_a_stream_under_a_transaction_lock_is_refused():
    @lock_view("a")
    def view(request):
        return StreamingHttpResponse(iter([b"one"]))

    with pytest.raises(ConfigurationError, match="streaming"), transaction.atomic():
        view(request_of())


NO_USER = "No user is logged in: log in first, or put @login_required above @lock_view"
NO_MIDDLEWARE = "Add django.contrib.auth.middleware.AuthenticationMiddleware to MIDDLEWARE"


@pytest.mark.parametrize(
    ("key", "attributes", "hint"),
    [
        ("checkout:{request.user.pk}", {"user": AnonymousUser()}, NO_USER),
        ("checkout:{request.user.pk}", {}, NO_MIDDLEWARE),
        ("checkout:{request.user.pk}", {"user": SimpleNamespace(pk=None)}, ""),
        ("cart:{request.user.pk}:{request.cart}", {"user": SimpleNamespace(pk=1)}, ""),
    ],
)
def test_a_value_that_is_missing_is_named_and_the_user_only_if_it_is_the_users(key, attributes, hint):
    request = RequestFactory().post("/")
    vars(request).update(attributes)
    with pytest.raises(LockKeyError, match=r"request\.(user\.pk|cart)") as refused:
        lock_view(key)(lambda request: None)(request)
    assert [text for text in (NO_USER, NO_MIDDLEWARE) if text in str(refused.value)] == [hint] * bool(hint)


def test_invalid_views_are_refused_at_decoration():
    def generator(request):
        yield

    with pytest.raises(ConfigurationError, match="a generator"):
        lock_view("a")(generator)
    with pytest.raises(LockKeyError, match="not a parameter"):
        lock_view("a:{order_id}")(lambda request: None)
    with pytest.raises(ConfigurationError, match="418"):
        lock_view("a", status=418)
    for wrong in (-1, 1.5, "5", True):
        with pytest.raises(ConfigurationError, match=r"lock_view: retry_after is .*; give whole seconds, 0 or more"):
            lock_view("a", retry_after=wrong)
    with pytest.raises(ConfigurationError, match="on_busy is 'skip'; give a function"):
        lock_view("a", on_busy="skip")
    with pytest.raises(ConfigurationError, match=r"<function .* as its key; write @lock_view\('order:{order_id}'\)"):

        @lock_view
        def view(request): ...


@pytest.mark.parametrize("methods", ["POST", [], ["POTS"], ["POST", None], "", {"GET", ""}, 5])
def test_methods_that_would_lock_nothing_are_refused(methods):
    with pytest.raises(ConfigurationError, match=r"methods is .*; give a list of GET, HEAD, POST"):
        lock_view("a", methods=methods)


# What the request is, and how the URL says it


def test_a_view_locked_for_get_is_also_locked_for_head(somebody):
    somebody.holds("a")
    for methods, locked in (["GET"], {"get", "head"}), (["POST"], {"post"}):
        view = lock_view("a", methods=methods)(lambda request: HttpResponse())
        found = {method for method in ("get", "head", "post") if view(request_of(method=method)).status_code == 409}
        assert found == locked


def test_positional_arguments_can_name_the_lock(somebody):
    """``re_path`` passes groups without names by their position."""

    @lock_view("order:{order_id}:{kind}")
    def view(request, order_id, kind="full"):
        return HttpResponse(somebody.can_have(f"order:{order_id}:{kind}"))

    assert view(request_of(), 5).content == b"False"
    assert view(request_of(), 5, "x").content == b"False"

    assert view(request=request_of(), order_id=5).content == b"False"
    with pytest.raises(ConfigurationError, match="no argument of the call is a request"):
        view(5)

    class Shop(View):
        @lock_view("order:{order_id}")
        def post(self, request, order_id):
            return HttpResponse(somebody.can_have(f"order:{order_id}"))

    assert Shop.as_view()(request_of(), 5).content == b"False"
    somebody.holds("order:6:full")
    busy = lock_view("order:{order_id}", on_busy=lambda error, request, order_id: HttpResponse(order_id, status=202))
    somebody.holds("order:6")
    assert busy(lambda request, order_id: HttpResponse())(request_of(), 6).content == b"6"


# Responses that are made or sent after the view has returned


def stream_of(somebody):
    return lock_view("a")(lambda request: StreamingHttpResponse(iter([b"one"])))


def test_a_template_is_rendered_under_the_lock(somebody):
    seen = []

    @lock_view("a")
    def view(request):
        return TemplateResponse(request, engines["django"].from_string("{{ text }}"), {"text": "rendered"})

    response = view(request_of())
    response.add_post_render_callback(lambda response: seen.append(somebody.can_have("a")))
    assert response.render().content == b"rendered"
    assert seen == [False]
    copy = pickle.loads(pickle.dumps(response))
    copy.close()
    assert not somebody.can_have("a"), "the copy in a cache has no lock"
    response.close()
    assert somebody.can_have("a")


def test_a_template_in_a_transaction_is_answered_as_usual(somebody):
    @lock_view("a")
    def view(request):
        return TemplateResponse(request, engines["django"].from_string("x"))

    with transaction.atomic():
        assert view(request_of()).render().content == b"x"
        assert not somebody.can_have("a")
    assert somebody.can_have("a")


def test_a_response_that_is_never_sent_frees_its_lock(somebody):
    response = stream_of(somebody)(request_of())
    assert not somebody.can_have("a")
    del response
    assert somebody.can_have("a")


def test_the_end_of_the_request_frees_the_lock_of_a_referenced_response(somebody):
    """The traceback of an exception or a log may refer to the response."""
    request_started.send(None)
    outer = stream_of(somebody)(request_of())
    request_started.send(None)
    inner = lock_view("b")(lambda request: StreamingHttpResponse(iter([b"one"])))(request_of())
    request_finished.send(None)
    assert somebody.can_have("b")
    assert not somebody.can_have("a"), "a view may call another one"
    request_finished.send(None)
    assert somebody.can_have("a")
    outer.close()
    inner.close()


@patch.object(responses, "LONGEST_HOLD", 0.05)
def test_after_the_longest_time_the_lock_is_freed_in_any_case(somebody, caplog, eventually):
    response = stream_of(somebody)(request_of())
    eventually(lambda: somebody.can_have("a"))
    response.close()
    # The lock is freed before the record is written.
    eventually(lambda: "its response was not closed within 0.05 s" in caplog.text)


def test_an_async_view_that_streams_under_wsgi_keeps_its_lock(somebody, eventually):
    """Its event loop ends when the view returns."""

    @lock_view("a")
    async def view(request):
        return StreamingHttpResponse(iter([b"one", b"two"]))

    response = async_to_sync(view)(request_of())
    assert not somebody.can_have("a")
    assert async_to_sync(view)(request_of()).status_code == 409
    assert b"".join(response) == b"onetwo"
    response.close()
    assert somebody.can_have("a")
    response = async_to_sync(view)(request_of())
    del response
    # The thread of the event loop may hold the lock for a moment longer.
    eventually(lambda: somebody.can_have("a"))


@override_settings(ROOT_URLCONF=__name__)
def test_the_user_of_an_async_view_is_read_from_the_database(somebody):
    """``request.user`` is lazy: its first use queries the database, which a coroutine must not do."""
    user = User.objects.create_user("ann")

    @async_to_sync
    async def click():
        client = AsyncClient()
        await client.aforce_login(user)
        return (await client.post("/checkout")).status_code

    assert click() == 200
    somebody.holds(f"checkout:{user.pk}")
    assert click() == 409
