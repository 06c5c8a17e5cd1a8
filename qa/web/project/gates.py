"""Places in a request at which a test sees the request, and may stop it until the test opens the request's gate.

A request is known by its name, the last part of its path. ``?stop=view`` stops it at the place "view". Marks and gates
are files, because the test and the servers are different processes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connection
from django.http import HttpRequest

#: Seconds after which a request continues by itself: its test has ended without opening the gate.
LIMIT = 180.0
#: Seconds between two checks of a gate.
PAUSE = 0.01
CHUNK = b"x" * 1024


def name_of(request: HttpRequest) -> str:
    return request.path.rstrip("/").rpartition("/")[2]


def stop(request: HttpRequest, place: str) -> str:
    """Record that the request has reached a place. If it must stop there, wait for its gate."""
    if _arrive(request, place):
        for _ in _looks(request):
            time.sleep(PAUSE)
    return place


async def astop(request: HttpRequest, place: str) -> str:
    """The same in a coroutine."""
    if _arrive(request, place):
        for _ in _looks(request):
            await asyncio.sleep(PAUSE)
    return place


def chunks(request: HttpRequest) -> Iterator[bytes]:
    """Yield the content of a stream. Stopped in the middle, it continues sending: so servers notice a lost client."""
    stop(request, "first")
    query()
    yield CHUNK
    if _arrive(request, "middle"):
        for _ in _looks(request):
            yield CHUNK
            time.sleep(PAUSE)
    yield CHUNK
    stop(request, "end")


async def achunks(request: HttpRequest) -> AsyncIterator[bytes]:
    """The same in a coroutine."""
    await astop(request, "first")
    await aquery()
    yield CHUNK
    if _arrive(request, "middle"):
        for _ in _looks(request):
            yield CHUNK
            await asyncio.sleep(PAUSE)
    yield CHUNK
    await astop(request, "end")


def query() -> None:
    """Use Django's own connection, as most views do."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


aquery = sync_to_async(query)


def _arrive(request: HttpRequest, place: str) -> bool:
    """Mark the place with the number of this process, and return whether the request is to stop there."""
    with open(settings.GATES / f"{name_of(request)}.{place}", "a") as marks:
        marks.write(f"{os.getpid()}\n")
    return request.GET.get("stop") == place


def _looks(request: HttpRequest) -> Iterator[None]:
    """Yield as long as the gate of the request is closed."""
    deadline = time.monotonic() + LIMIT
    gate = settings.GATES / f"{name_of(request)}.open"
    while not gate.exists() and time.monotonic() < deadline:
        yield
