"""Concurrent claims: no row or task is claimed twice."""

from __future__ import annotations

from collections import Counter
from uuid import uuid4

import pytest
from django.db.models import F

from django_pglock.models import Task
from django_pglock.store.claim import claim_statement, claims_of
from tests.sample.models import Letter, Parcel, Sender

pytestmark = pytest.mark.django_db(transaction=True)
FREE = [Parcel.Status.NEW, Parcel.Status.RETURNED]


def test_eight_threads_move_every_row_exactly_once(in_threads):
    sender = Sender.objects.create()
    Parcel.objects.bulk_create(Parcel(sender=sender, weight=n, status=FREE[n % 2]) for n in range(200))

    def move_all(number):
        moved = []
        free = Parcel.objects.filter(status__in=FREE).order_by("id")
        while rows := free.claim_update(7, status="taken", attempts=F("attempts") + 1):
            moved += [(row.pk, row.attempts) for row in rows]
        return moved

    moved = [each for rows in in_threads(move_all, 8) for each in rows]
    assert sorted(moved) == [(pk, 1) for pk in sorted(Parcel.objects.values_list("pk", flat=True))]


def test_passes_of_four_threads_handle_every_row_exactly_once(in_threads):
    """Each pass skips rows that other threads have locked, and does not end early because of them."""
    Letter.objects.bulk_create(Letter(text=str(n)) for n in range(60))

    def take_all(number):
        taken = []

        def handle(letter):
            taken.append(letter.pk)
            Letter.objects.filter(pk=letter.pk).update(status="taken")

        while Letter.objects.filter(status="new").claim_each(7, handle):
            pass
        return taken

    taken = [pk for each in in_threads(take_all, 4) for pk in each]
    assert len(taken) == 60
    assert set(Counter(taken).values()) == {1}


def test_eight_workers_claim_every_task_exactly_once(in_threads):
    """The claim statement of the worker, under the same conditions."""
    Task.objects.bulk_create(
        Task(queue="default", backend="default", task_path="tests.sample.tasks.nothing") for _ in range(300)
    )

    def claim_all(number):
        worker = uuid4()
        statement = claim_statement("default", worker=worker, paths=["tests.sample.tasks.nothing"])
        claims = []
        while rows := statement.execute(11, "default"):
            claims += claims_of(rows, worker)
        return [(claim.id, claim.attempt) for claim in claims]

    claims = [claim for each in in_threads(claim_all, 8) for claim in each]
    assert len(claims) == 300
    assert len(set(claims)) == 300
    assert set(Task.objects.values_list("status", "attempts")) == {("RUNNING", 1)}
