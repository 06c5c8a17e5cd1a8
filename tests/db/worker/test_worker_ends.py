"""A worker that ends by itself: when nothing is left to do, or when it has done enough."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import transaction

from django_pglock.errors import ConfigurationError
from django_pglock.models import Queue, Task, Worker
from django_pglock.worker import Worker as Process
from django_pglock.worker.settling.settler import Settler
from django_pglock.worker.supervising.channel import REPLACE
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


def drain(**options) -> Process:
    return run(drain=True, **options)


def run(**options) -> Process:
    process = Process(threads=2, grace=5, **options)
    ended = threading.Thread(target=process.run, daemon=True)
    ended.start()
    ended.join(20)
    is_over = not ended.is_alive()
    process.shutdown()
    assert is_over, "it did not end"
    return process


def statuses() -> dict[str, int]:
    found = list(Task.objects.values_list("status", flat=True))
    return {status: found.count(status) for status in found}


def test_it_ends_when_nothing_is_left():
    with transaction.atomic():
        for number in range(50):
            tasks.record.enqueue("drained", number)
    drain()
    assert statuses() == {"SUCCESSFUL": 50}
    assert not Worker.objects.exists()


def test_with_nothing_to_do_it_ends_at_once():
    drain(listens=False)


def test_it_waits_for_what_it_has_in_hand_and_for_what_follows():
    """The second attempts are ready when the first have ended; what runs keeps it, while the other thread is idle."""
    tasks.fail_twice.enqueue("again")
    tasks.note_and_sleep.enqueue("slow", 0.5)
    first = tasks.note_and_sleep.enqueue("first", 0.3)
    tasks.record.using(after=[first]).enqueue("follower")
    tasks.sleep_async.enqueue(0.5)
    drain()
    assert statuses() == {"SUCCESSFUL": 5}


def test_a_task_is_in_hand_until_its_followers_are_ready(monkeypatch):
    let_through = Settler._let_through
    monkeypatch.setattr(Settler, "_let_through", lambda *arguments: (time.sleep(0.3), let_through(*arguments)))
    tasks.record.using(after=[tasks.nothing.enqueue()]).enqueue("follower")
    drain()
    assert statuses() == {"SUCCESSFUL": 2}


def test_what_is_due_counts_and_what_is_scheduled_for_later_does_not():
    tasks.record.using(run_after=timedelta(hours=1)).enqueue("later")
    for number in range(20):
        tasks.record.using(run_after=timedelta(milliseconds=1), lock="same").enqueue("due", number)
    drain()
    assert statuses() == {"SCHEDULED": 1, "SUCCESSFUL": 20}
    assert list(Effect.objects.order_by("id").values_list("number", flat=True)) == list(range(20)), "one key, in order"


def test_what_it_may_not_take_is_left():
    tasks.record.using(queue_name="mail").enqueue("of another queue")
    tasks.record.using(queue_name="paused").enqueue("paused")
    Queue.objects.pause("paused")
    Task.objects.filter(pk=tasks.record.enqueue("unknown").id).update(task_path="shop.tasks.of_another_deploy")
    tasks.record.enqueue("mine")
    drain(queues=["default", "paused"])
    assert statuses() == {"READY": 3, "SUCCESSFUL": 1}


def test_it_ends_after_so_many_tasks():
    for number in range(10):
        tasks.record.enqueue("counted", number)
    run(max_tasks=3)
    assert statuses() == {"READY": 7, "SUCCESSFUL": 3}


def test_another_is_asked_for_as_soon_as_the_last_task_is_claimed(worker, eventually):
    """Long before the task has ended, so that no thread is missed meanwhile."""
    words = []
    line = SimpleNamespace(number=1, tell=words.append, start=lambda: None)
    worker(max_tasks=1, line=line)
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: words == [REPLACE], seconds=5)
    Effect.objects.create(name="go on")
    eventually(lambda: statuses() == {"SUCCESSFUL": 1})


@pytest.mark.parametrize("limit", [{"max_time": 0.5}, {"max_memory": 1}])
def test_it_ends_at_a_limit(limit, caplog):
    tasks.record.enqueue("one task, at least, before memory is looked at")
    with caplog.at_level("INFO", logger="django_pglock"):
        run(**limit)
    assert "ends: it" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"using": "nope"}, "DATABASES has no 'nope'; it has default"),
        ({"threads": 0}, "threads: '0' is no number from 1 to 1000"),
        ({"threads": True}, "threads: 'True' is no number"),
        ({"grace": -1}, "grace: '-1' are no seconds, zero or more"),
        ({"grace": float("nan")}, "grace: 'nan' are no seconds"),
        ({"max_tasks": 0}, "max_tasks: '0' is no number from 1"),
        ({"max_memory": 0}, "max_memory: '0' is not above zero"),
        ({"max_time": -1}, "max_time: '-1' are no seconds"),
        ({"probe_port": 65536}, "probe_port: '65536' is no port"),
        ({"probe_host": "127.0.0.1"}, "but no port"),
        ({"heartbeat_file": ""}, "heartbeat file is empty"),
    ],
)
def test_what_the_command_refuses_is_refused_in_python(options, text):
    """Without threads, or a database, it would never end what it was to drain."""
    with pytest.raises(ConfigurationError, match=text):
        Process(drain=True, **options)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_ends_when_one_of_its_parts_has(monkeypatch):
    """It would beat and claim on, and nothing would come of that."""

    tasks.nothing.enqueue()
    process = Process(threads=1, grace=5)
    monkeypatch.setattr(process.upkeep, "_one_turn", lambda: exec("raise SystemExit"))
    with pytest.raises(RuntimeError, match=r"The upkeep has ended\. So has the worker\."):
        process.run()
    assert statuses() == {"SUCCESSFUL": 1}
    assert not Worker.objects.exists()


def test_a_service_goes_on_whatever_its_turn_raises(worker, eventually, monkeypatch):
    turns = []

    def leave():
        turns.append(1)
        raise SystemExit("a mistake of ours")

    process = worker()
    monkeypatch.setattr(process.upkeep, "turn", leave)
    process.upkeep.wake()
    eventually(lambda: len(turns) > 1)
    assert process.health.missing() is None


def test_a_signal_after_its_own_end_has_begun_is_the_first(worker):
    """It lets running tasks finish; only the next one hurries."""
    process = worker()
    process.retire()
    process.stop()
    assert not process._hurry.is_set()
    process.stop()
    assert process._hurry.is_set()


def test_a_signal_may_come_between_any_two_lines():
    """Its handler runs in the thread that waits for it, or sets the same itself, and must not wait for that thread."""
    process = Process(threads=1)

    def handle(*args):
        process.stop()
        return handle

    def wait_and_end():
        sys.settrace(handle)
        process._asked_to_stop.wait(0.1)
        process.end()
        process._give_up_grace()
        sys.settrace(None)

    waiting = threading.Thread(target=wait_and_end, daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive(), "it waits for itself"
    assert process.is_stopping
