"""Views that change and export accounts under locks."""

from __future__ import annotations

from collections.abc import Iterator

from django.db.models import F
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path

from django_pglock import lock, lock_view
from qa.foreign.sample.tasks import nothing
from qa.foreign.tracked.models import Account


@lock_view("pay:{pk}", methods=["POST"])
def pay(request: HttpRequest, pk: int) -> HttpResponse:
    with lock("accounts", pk):
        Account.objects.filter(pk=pk).update(balance=F("balance") + 1)
    nothing.enqueue("100% paid", pk=pk)
    return HttpResponse("paid")


@lock_view("export")
def export(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(_lines())


def _lines() -> Iterator[str]:
    for account in Account.objects.order_by("pk").iterator(chunk_size=2):
        yield f"{account.balance}\n"


urlpatterns = [path("pay/<int:pk>/", pay), path("export/", export)]
