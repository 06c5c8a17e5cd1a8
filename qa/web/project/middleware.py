"""Middleware of the project: where requests stop outside of their views, and how responses get lost there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.decorators import sync_and_async_middleware

from qa.web.project.gates import astop, stop


@sync_and_async_middleware
def stops(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Let a request stop before and after its view."""

    def answer(request: HttpRequest) -> HttpResponse:
        stop(request, "before")
        response = get_response(request)
        stop(request, "after")
        return response

    async def aanswer(request: HttpRequest) -> HttpResponse:
        await astop(request, "before")
        response = await get_response(request)
        await astop(request, "after")
        return response

    return aanswer if iscoroutinefunction(get_response) else answer


@sync_and_async_middleware
def drops(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Lose the view's response without closing it: ``?drop=raise`` or ``?drop=replace``."""

    def answer(request: HttpRequest) -> HttpResponse:
        return lose(request, get_response(request))

    async def aanswer(request: HttpRequest) -> HttpResponse:
        return lose(request, await get_response(request))

    return aanswer if iscoroutinefunction(get_response) else answer


def lose(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    how = request.GET.get("drop")
    if how == "raise":
        raise PermissionDenied
    return HttpResponse("replaced", status=202) if how == "replace" else response
