"""What people and their code do with tasks."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from django_pglock import enqueue_many
from django_pglock.errors import DuplicateTask
from django_pglock.models import Queue, Task
from django_pglock.store.release import ended, write_waiters
from django_pglock.store.requests_to_worker import request_stack
from qa.interleavings.verbs import VERBS, Results, in_a_transaction, verb
from qa.interleavings.worlds import World, amend
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

IN_AN_HOUR = timedelta(hours=1)

# People and their code


@verb("plain")
def enqueue(world: World, results: Results) -> None:
    tasks.nothing.enqueue()


@verb("plain")
def enqueue_later(world: World, results: Results) -> None:
    tasks.nothing.using(run_after=IN_AN_HOUR).enqueue()


@verb("plain")
def enqueue_several(world: World, results: Results) -> None:
    enqueue_many(tasks.nothing, [1, 2])


@verb("key", "after")
def enqueue_at_a_key(world: World, results: Results) -> None:
    keyed.step.enqueue("a")


@verb("key")
def enqueue_at_a_free_key(world: World, results: Results) -> None:
    keyed.step.enqueue("free")


@verb("key")
def enqueue_at_several_keys(world: World, results: Results) -> None:
    enqueue_many(keyed.step, ["free", "b", "a"])


@verb("concurrent")
def enqueue_beside_others(world: World, results: Results) -> None:
    keyed.call.enqueue("x")


@verb("group")
def enqueue_for_a_group(world: World, results: Results) -> None:
    keyed.digest.enqueue(user=1, text="")


@verb("group")
def enqueue_for_a_group_at_a_key(world: World, results: Results) -> None:
    keyed.note.enqueue(order_id="a", author=1, text="")


@verb("shared")
def enqueue_at_a_rate(world: World, results: Results) -> None:
    keyed.trickle.enqueue("a")


@verb("shared")
def enqueue_several_at_a_rate(world: World, results: Results) -> None:
    enqueue_many(keyed.trickle, ["new", "a", "new"])


@verb("shared")
def enqueue_in_turns(world: World, results: Results) -> None:
    keyed.serve.enqueue("m")


@verb("unique")
def enqueue_while_waiting(world: World, results: Results) -> None:
    keyed.refresh.enqueue(1)


@verb("unique")
def enqueue_while_unfinished(world: World, results: Results) -> None:
    keyed.rebuild.enqueue(1)


@verb("unique")
def enqueue_for_a_period(world: World, results: Results) -> None:
    with suppress(DuplicateTask):
        keyed.remind.enqueue(1)


@verb("unique")
def enqueue_several_unique(world: World, results: Results) -> None:
    enqueue_many(keyed.rebuild, [3, 2, 1])


@verb("unique")
def enqueue_several_unique_backwards(world: World, results: Results) -> None:
    enqueue_many(keyed.rebuild, [1, 2, 3])


@verb("unique")
def take_the_place_of_another(world: World, results: Results) -> None:
    keyed.save.enqueue(1, text="y")


@verb("unique")
def take_the_place_of_another_at_another_key(world: World, results: Results) -> None:
    amend.enqueue(2, text="y")


@verb("after")
def enqueue_after(world: World, results: Results) -> None:
    keyed.step.using(after=world.parents).enqueue("a")


@verb("after")
def enqueue_several_after(world: World, results: Results) -> None:
    enqueue_many(keyed.step.using(after=world.parents), ["a", "b"])


@verb(retries=True)
def retry(world: World, results: Results) -> None:
    Task.objects.all().retry()


@verb()
def cancel(world: World, results: Results) -> None:
    Task.objects.all().cancel()


@verb("plain")
def ask_for_a_stack(world: World, results: Results) -> None:
    for each in world.claims:
        request_stack("default", each.id)


@verb("plain", "unique", "after", retries=True)
def discard(world: World, results: Results) -> None:
    Task.objects.all().discard()


@verb("plain", "key", "shared")
def run_now(world: World, results: Results) -> None:
    Task.objects.all().run_now()


@verb()
def reset_stuck(world: World, results: Results) -> None:
    results.taken_back |= {each.id for each in world.zombies}
    Task.objects.all().reset_stuck()


@verb("plain", "unique", "after", prunes=True)
def prune(world: World, results: Results) -> None:
    Task.objects.all().prune(older_than=0, statuses=["SUCCESSFUL", "FAILED", "CANCELLED"])


@verb("plain", "unique", "after", prunes=True)
def delete_finished(world: World, results: Results) -> None:
    Task.objects.all().delete_finished()


@verb("plain")
def move_to_queue(world: World, results: Results) -> None:
    Task.objects.all().move_to_queue("other")


@verb("plain")
def pause(world: World, results: Results) -> None:
    Queue.objects.pause("default")


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
