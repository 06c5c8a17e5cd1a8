"""What is reported about the lock of a response that another thread, or the server of an async view, closes."""

from __future__ import annotations

import asyncio
import gc
import logging
from unittest.mock import patch

import pytest
from django.core.handlers.asgi import ASGIHandler
from django.db import connection
from django.http import StreamingHttpResponse
from django.test import RequestFactory, override_settings
from django.urls import path

from django_pglock import lock_view
from django_pglock.locks import responses
from django_pglock.postgres.connections import has_ended
from django_pglock.postgres.sessions import AsyncSession
from django_pglock.signals import lock_lost, lock_released

pytestmark = pytest.mark.django_db(transaction=True)
HOLDER = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1"


@pytest.fixture
def heard():
    """The signals about locks."""
    heard = []

    def note(signal, handle, held, **kwargs):
        heard.append((signal, handle.name))
        assert held >= 0

    for signal in (lock_released, lock_lost):
        signal.connect(note)
    yield heard
    for signal in (lock_released, lock_lost):
        signal.disconnect(note)


@lock_view("a")
def stream(request):
    return StreamingHttpResponse([b"one"])


@lock_view("a")
async def stream_async(request):
    async def pieces():
        yield b"one"

    return StreamingHttpResponse(pieces())


@pytest.fixture(params=["thread", "coroutine"])
def close(request, in_threads):
    """Make a response, call a function and close the response."""

    def close(meanwhile):
        if request.param == "thread":
            response = stream(RequestFactory().get("/"))
            meanwhile()
            in_threads(lambda _: response.close(), 1)
        else:

            async def main():
                response = await stream_async(RequestFactory().get("/"))
                await asyncio.to_thread(meanwhile)
                response.close()

            asyncio.run(main())

    yield close
    connection.close()


def test_the_end_of_the_lock_is_signalled(close, heard):
    close(lambda: None)
    assert heard == [(lock_released, "a")]


def test_a_lock_that_was_lost_while_the_response_was_sent_is_reported(somebody, close, heard, eventually, caplog):
    def lose():
        sessions = [each for each in gc.get_objects() if isinstance(each, AsyncSession)]
        raws = [connection.connection, *(each.raw for each in sessions)]
        pid = somebody.ask(HOLDER)
        [holder] = [raw for raw in raws if raw is not None and not raw.closed and raw.info.backend_pid == pid]
        somebody.ends_session(pid)
        # The server frees the lock a moment before it closes the socket.
        eventually(lambda: has_ended(holder))

    close(lose)
    assert heard == [(lock_lost, "a"), (lock_released, "a")]
    assert "Lock 'a' was lost before it was released: its session has ended." in caplog.text


class Raising(logging.Handler):
    def emit(self, record):
        raise OSError("the disk of the log is full")


@patch.object(responses, "LONGEST_HOLD", 0.05)
def test_a_log_handler_that_raises_does_not_keep_the_lock_of_a_response(somebody, eventually):
    """Two responses, because the first one must not end the thread that frees the second one."""
    handler = Raising()
    logging.getLogger("django_pglock.locks").addHandler(handler)
    try:
        for name in ("a", "b"):
            view = lock_view(name)(lambda request: StreamingHttpResponse(iter([b"one"])))
            response = view(RequestFactory().get("/"))
            eventually(lambda name=name: somebody.can_have(name))
            response.close()
    finally:
        logging.getLogger("django_pglock.locks").removeHandler(handler)


async def broken():
    yield b"one"
    raise ZeroDivisionError


@lock_view("a")
def break_off(request):
    return StreamingHttpResponse(broken())


@lock_view("a")
async def break_off_async(request):
    return StreamingHttpResponse(broken())


urlpatterns = [path("sync", break_off), path("async", break_off_async), path("good", stream_async)]


async def serve(url, refuse=False):
    """Call Django as an ASGI server does."""
    scope = {"type": "http", "method": "GET", "path": f"/{url}", "query_string": b""}
    scope["headers"] = [(b"host", b"testserver")]
    received = iter([{"type": "http.request"}])

    async def receive():
        return next(received, None) or await asyncio.Event().wait()

    async def send(message):
        if refuse and message.get("body"):
            raise ZeroDivisionError

    await ASGIHandler()(scope, receive, send)


@override_settings(ROOT_URLCONF=__name__)
@pytest.mark.parametrize("call", [("sync",), ("async",), ("good", True)], ids=lambda call: call[0])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_stream_that_raises_under_asgi_frees_its_lock(somebody, call, eventually):
    """Django closes neither the response nor the body of the request. The exception keeps the response."""
    with pytest.raises(ZeroDivisionError) as kept:
        asyncio.run(serve(*call))
    eventually(lambda: somebody.can_have("a"))
    del kept
    gc.collect()
