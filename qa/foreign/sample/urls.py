"""Views of a project that locks, enqueues and streams."""

from __future__ import annotations

from collections.abc import Iterator

from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path

from django_pglock import lock, lock_view
from qa.foreign.sample.models import Letter
from qa.foreign.sample.tasks import nothing


def post(request: HttpRequest) -> HttpResponse:
    """Write a letter under a lock, and enqueue."""
    with lock("letters"):
        Letter.objects.create(text=request.GET.get("text", ""))
    nothing.enqueue("posted")
    return HttpResponse("posted", content_type="text/html")


@lock_view("page:{request.path}")
def page(request: HttpRequest) -> HttpResponse:
    """Read letters under the lock of a view."""
    return HttpResponse(f"<html><body>{Letter.objects.count()} letters</body></html>")


@lock_view("export:{request.path}")
def export(request: HttpRequest) -> StreamingHttpResponse:
    """Stream all letters through a server-side cursor; the lock is held until the response is closed."""
    return StreamingHttpResponse(_lines(), content_type="text/plain")


def _lines() -> Iterator[str]:
    for letter in Letter.objects.order_by("id").iterator(chunk_size=2):
        yield f"{letter.text}\n"


urlpatterns = [path("post/", post), path("page/", page), path("export/", export)]
