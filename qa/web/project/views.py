"""A view of every kind, each under the lock ``web:NAME`` of its request."""

from __future__ import annotations

import functools
import gc
from typing import Any

from django.conf import settings
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.template.response import TemplateResponse
from django.utils.http import http_date
from django.views.generic import TemplateView

from django_pglock import lock_view
from qa.web.project.gates import achunks, aquery, astop, chunks, query, stop

#: More than the buffers of the sockets of client and server take while the client does not read.
FILE_SIZE = 8 * 1024 * 1024
LOCK = "web:{name}"
# Not the beginning of the epoch: Django takes that for no date at all.
LONG_AGO = http_date(1)

locked = lock_view(LOCK)


def ready(request: HttpRequest) -> HttpResponse:
    query()
    return HttpResponse("ready")


def collect(request: HttpRequest, name: str) -> HttpResponse:
    """Have Python collect the unused objects of this process."""
    gc.collect()
    return HttpResponse("collected")


@locked
def plain(request: HttpRequest, name: str) -> HttpResponse:
    query()
    return HttpResponse(stop(request, "view"))


@locked
async def plain_async(request: HttpRequest, name: str) -> HttpResponse:
    await aquery()
    return HttpResponse(await astop(request, "view"))


@lock_view(LOCK, timeout=60)
def waits(request: HttpRequest, name: str) -> HttpResponse:
    return HttpResponse(stop(request, "view"))


@lock_view(LOCK, timeout=60)
async def waits_async(request: HttpRequest, name: str) -> HttpResponse:
    return HttpResponse(await astop(request, "view"))


@locked
def stream(request: HttpRequest, name: str) -> StreamingHttpResponse:
    stop(request, "view")
    return StreamingHttpResponse(chunks(request), headers={"Last-Modified": LONG_AGO})


@locked
async def stream_async(request: HttpRequest, name: str) -> StreamingHttpResponse:
    await astop(request, "view")
    return StreamingHttpResponse(achunks(request), headers={"Last-Modified": LONG_AGO})


@locked
def template(request: HttpRequest, name: str) -> TemplateResponse:
    stop(request, "view")
    return TemplateResponse(request, "page.html", {"stop": functools.partial(stop, request, "render")})


@locked
class Template(TemplateView):
    template_name = "page.html"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        stop(self.request, "view")
        return super().get_context_data(stop=functools.partial(stop, self.request, "render"), **kwargs)


@locked
def file(request: HttpRequest, name: str) -> FileResponse:
    stop(request, "view")
    path = settings.GATES / f"{name}.content"
    with path.open("wb") as content:
        content.truncate(FILE_SIZE)
    return FileResponse(path.open("rb"))
