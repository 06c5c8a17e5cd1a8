"""What each node does: claim some rows that nobody else has, process them, look again."""

from __future__ import annotations

import time

from django.db import transaction

from django_pglock import listen
from example_project.systems.sharing.models import Result, Row

MOST_ATTEMPTS = 3


def process(row: Row, node: str) -> None:
    """Make the result of a row. Stands for a call of another service, which takes 5 ms."""
    time.sleep(0.005)
    Result.objects.create(row=row, node=node, text=f"half of {row.data} is {int(row.data) // 2}")


def process_batch(node: str, limit: int = 10) -> int:
    """Process up to ``limit`` rows that no other node has; return how many there were."""
    waiting = Row.objects.filter(processed=False, attempts__lt=MOST_ATTEMPTS).order_by("attempts", "id")
    with waiting.claim(limit) as rows:
        for row in rows:
            try:
                with transaction.atomic():  # a savepoint: an error undoes this row's work, and no other's
                    process(row, node)
            except Exception as error:
                row.attempts, row.error = row.attempts + 1, repr(error)
            else:
                row.processed = True
            row.save(update_fields=["processed", "attempts", "error"])
    return len(rows)


def run_node(node: str) -> None:
    """Process rows until the process ends. Kill it to stop it: its transaction is rolled back, and others continue."""
    for _ in listen("rows", poll=1):  # rows of programs that do not notify are found within a second
        while process_batch(node):
            pass
