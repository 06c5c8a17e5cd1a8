"""The hand-off with a table of one's own: the front end calls ``hand_over()``, each back end runs ``serve()``."""

from django.db import models, transaction

from django_pglock import listen, notify
from example_project.systems.handoff.models import Request, Sheet

new = Request.objects.filter(status="new").order_by("id")
# While one back end holds the oldest request of a sheet, nobody else can hold any of that sheet.
oldest = new.exclude(models.Exists(new.filter(sheet=models.OuterRef("sheet"), id__lt=models.OuterRef("id"))))


@transaction.atomic
def hand_over(*requests: Request) -> None:
    Request.objects.bulk_create(requests, ignore_conflicts=True)
    notify("handoff")


def serve() -> None:
    for _ in listen("handoff", poll=1):
        while oldest.claim_each(100, handle, failed={"status": "error"}):
            pass


def handle(first: Request) -> None:
    requests = new.filter(sheet=first.sheet, kind=first.kind).claim(1000)
    if first.kind == "create":
        Sheet.objects.get_or_create(name=first.sheet)
    else:
        Sheet.objects.select_for_update().get(name=first.sheet).append([each.line for each in requests])
    Request.objects.filter(id__in=[each.id for each in requests]).update(status="complete", run=first.id)
