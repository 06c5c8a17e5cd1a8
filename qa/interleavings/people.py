"""What people and their code do with tasks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from django_pglock import enqueue_many
from django_pglock.errors import DuplicateTask
from django_pglock.models import Queue, Task
from django_pglock.store.release import ended, write_waiters
from django_pglock.store.requests_to_worker import request_stack
from django_pglock.tasks.states import FINISHED
from qa.interleavings.verbs import VERBS, Results, in_a_transaction, verb
from qa.interleavings.worlds import World, amend
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

IN_AN_HOUR = timedelta(hours=1)

#: What people call, by the name of the verb: the worlds in which it meets others, and the call.
CALLS: dict[str, tuple[str, Callable[[World], object]]] = {
    "enqueue": ("plain", lambda world: tasks.nothing.enqueue()),
    "enqueue_later": ("plain", lambda world: tasks.nothing.using(run_after=IN_AN_HOUR).enqueue()),
    "enqueue_several": ("plain", lambda world: enqueue_many(tasks.nothing, [1, 2])),
    "enqueue_at_a_key": ("key after", lambda world: keyed.step.enqueue("a")),
    "enqueue_at_a_free_key": ("key", lambda world: keyed.step.enqueue("free")),
    "enqueue_at_several_keys": ("key", lambda world: enqueue_many(keyed.step, ["free", "b", "a"])),
    "enqueue_beside_others": ("concurrent", lambda world: keyed.call.enqueue("x")),
    "enqueue_for_a_group": ("group", lambda world: keyed.digest.enqueue(user=1, text="")),
    "enqueue_for_a_group_at_a_key": ("group", lambda world: keyed.note.enqueue(order_id="a", author=1, text="")),
    "enqueue_at_a_rate": ("shared", lambda world: keyed.trickle.enqueue("a")),
    "enqueue_several_at_a_rate": ("shared", lambda world: enqueue_many(keyed.trickle, ["new", "a", "new"])),
    "enqueue_in_turns": ("shared", lambda world: keyed.serve.enqueue("m")),
    "enqueue_while_waiting": ("unique", lambda world: keyed.refresh.enqueue(1)),
    "enqueue_while_unfinished": ("unique", lambda world: keyed.rebuild.enqueue(1)),
    "enqueue_several_unique": ("unique", lambda world: enqueue_many(keyed.rebuild, [3, 2, 1])),
    "enqueue_several_unique_backwards": ("unique", lambda world: enqueue_many(keyed.rebuild, [1, 2, 3])),
    "take_a_free_unique_key": ("unique", lambda world: keyed.save.enqueue(9, text="y")),
    "take_the_place_of_another": ("unique", lambda world: keyed.save.enqueue(1, text="y")),
    "take_the_place_of_another_at_another_key": ("unique", lambda world: amend.enqueue(2, text="y")),
    "enqueue_after": ("after", lambda world: keyed.step.using(after=world.parents).enqueue("a")),
    "enqueue_several_after": (
        "after",
        lambda world: enqueue_many(keyed.step.using(after=world.parents), ["a", "b"]),
    ),
    "retry": ("", lambda world: Task.objects.all().retry()),
    "retry_dependants": (
        "after steps",
        lambda world: Task.objects.exclude(meta__has_key="after").retry(dependants=True),
    ),
    "cancel": ("", lambda world: Task.objects.all().cancel()),
    "cancel_parts": ("after family", lambda world: Task.objects.filter(waits_for__gt=0).cancel(parts=True)),
    "discard": ("plain unique after family steps", lambda world: Task.objects.all().discard()),
    "run_now": ("plain key shared steps", lambda world: Task.objects.all().run_now()),
    "prune": (
        "plain unique after family steps",
        lambda world: Task.objects.all().prune(older_than=0, statuses=[*FINISHED]),
    ),
    "delete_finished": ("plain unique after family steps", lambda world: Task.objects.all().delete_finished()),
    "move_to_queue": ("plain", lambda world: Task.objects.all().move_to_queue("other")),
    "pause": ("plain", lambda world: Queue.objects.pause("default")),
}
RETRIES, PRUNES = {"retry", "retry_dependants", "discard"}, {"prune", "delete_finished"}


def add(name: str, worlds: str, call: Callable[[World], object]) -> None:
    """Add such a call to the table of verbs."""

    def without_result(world: World, results: Results) -> None:
        call(world)

    without_result.__name__ = name
    verb(*worlds.split(), retries=name in RETRIES, prunes=name in PRUNES)(without_result)


for name, (worlds, call) in CALLS.items():
    add(name, worlds, call)


@verb("unique")
def enqueue_for_a_period(world: World, results: Results) -> None:
    with suppress(DuplicateTask):
        keyed.remind.enqueue(1)


@verb("plain")
def ask_for_a_stack(world: World, results: Results) -> None:
    for each in world.claims:
        request_stack("default", each.id)


@verb()
def reset_stuck(world: World, results: Results) -> None:
    results.taken_back |= {each.id for each in world.zombies}
    Task.objects.all().reset_stuck()


@verb("plain")
def pause_and_resume(world: World, results: Results) -> None:
    Queue.objects.pause("default")
    Queue.objects.resume("default")


@verb("plain", "key")
def hold_rows(world: World, results: Results) -> None:
    """Lock what is ready for the length of a transaction, as a caller of ``claim()`` does, and change nothing."""
    with Task.objects.ready().order_by("pk").claim(2) as rows:
        list(rows)


@verb()
def wait_for_results(world: World, results: Results) -> None:
    ids = [each.id for each in (*world.claims, *world.zombies)]
    write_waiters("default", ids, instead_of=[])
    ended("default", ids)


for name in [*VERBS]:
    if name not in ("wait_for_results", "hold_rows", "pause_and_resume"):
        in_a_transaction(name)
