"""Captured changes: the trigger enqueues in the transaction of the change, and no change is missed."""

from __future__ import annotations

import json
from collections import Counter

from django.db.models import F

from django_pglock.store.outcome import Succeeded
from tests.interleavings.judge import Judge, law
from tests.interleavings.verbs import Results, in_a_transaction, verb
from tests.interleavings.workers import settling
from tests.interleavings.worlds import World
from tests.property.simulation import claim
from tests.sample import captured_tasks
from tests.sample.models import Product

#: The unique one reads the price when it runs; the other one is enqueued once for each change, for a group.
UNIQUE, GROUPED = captured_tasks.note_price, captured_tasks.digest_each
PATHS = [UNIQUE.module_path, GROUPED.module_path]


def captures(world: World) -> None:
    """The changes of one product are waiting, and those of another one are processed."""
    for function in (UNIQUE, GROUPED):
        world.install(function, on="update", name=function.name)
    first, second = Product.objects.bulk_create([Product(name="first"), Product(name="second")])
    Product.objects.filter(pk=first.pk).update(price=1)
    world.keeps(Product)
    world.facts = {"prices": prices(), "first": first.pk, "second": second.pk}


def prices() -> dict[int, int]:
    return dict(Product.objects.values_list("pk", "price"))


@verb("captures")
def change_one(world: World, results: Results) -> None:
    Product.objects.filter(pk=world.facts["first"]).update(price=F("price") + 1)


@verb("captures")
def change_all(world: World, results: Results) -> None:
    Product.objects.update(price=F("price") + 1)


@verb("captures")
def change_nothing(world: World, results: Results) -> None:
    Product.objects.filter(price=-1).update(price=0)


@verb("captures")
def enqueue_by_hand(world: World, results: Results) -> None:
    UNIQUE.enqueue(id=world.facts["second"])


@verb("captures", is_workers=True)
def run_captured(world: World, results: Results) -> None:
    """Claim the tasks, read what they are about, and succeed."""
    taken = claim(results.worker(), 10, PATHS)
    results.claims += taken
    about = [json.loads(each.kwargs)["id"] for each in taken if each.task_path == UNIQUE.module_path]
    read = prices()
    results.read += [(pk, read[pk]) for pk in about]
    settling(world, results, [(each, Succeeded()) for each in taken])


for name in ("change_one", "change_all", "enqueue_by_hand"):
    in_a_transaction(name)


@law("captures")
def no_change_is_missed(judge: Judge) -> None:
    """A task still waits, or has begun after the change has read it. A dead worker has its claim still."""
    waiting = {
        task.kwargs["id"]
        for task in judge.now.values()
        if task.task_path == UNIQUE.module_path and not task.finished_at
    }
    read = {(pk, 0) for pk in judge.world.facts["prices"]} | set(judge.results.read)
    for pk, price in prices().items():
        assert pk in waiting or (pk, price) in read, f"nobody will hear of price {price} of product {pk}"


@law("captures")
def each_change_is_one_task(judge: Judge) -> None:
    tasks = Counter(task.kwargs["id"] for task in judge.now.values() if task.task_path == GROUPED.module_path)
    assert tasks == Counter(prices()), "not one task for each change"
