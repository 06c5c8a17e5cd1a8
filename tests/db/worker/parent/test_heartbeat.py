"""The heartbeat of a parent: rows, lock, notifications, requests, and sessions that are lost."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from django_pglock.keys.reserved import WORKER
from django_pglock.models import AdvisoryLock, Attempt, Task, Worker
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.liveness import Beat
from django_pglock.store.requests_to_worker import request_stack
from django_pglock.worker.parent import heartbeat as module
from django_pglock.worker.parent.heartbeat import Heartbeat
from tests.conftest import NEVER
from tests.db.store.test_cancel import wait_until_begun
from tests.db.worker.conftest import wait_for_end
from tests.db.worker.parent.conftest import sessions, terminate
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


class FakeWorkers:
    """The workers of a parent, which note what the heartbeat tells them."""

    def __init__(self, *ids):
        self.parent, self.ids = uuid4(), list(ids)
        self.written, self.told, self.wakes, self.upkeeps, self.requests = [], [], [], [], []

    def beats(self):
        return [self.beat_of(each) for each in self.ids]

    def note_beat(self, replies, began):
        self.written.append(set(replies))

    def tell(self, worker=None, **message):
        if worker is None:
            self.told.append(message)
        else:
            self.requests.append((worker, message))

    def wake(self, *about):
        self.wakes.append(about)

    def wake_upkeep(self, *, rescues=False):
        self.upkeeps.append(rescues)

    def beat_of(self, worker):
        values = {"name": f"worker {worker.hex}", "hostname": "h", "pid": 1, "queues": [], "threads": 1}
        return Beat(worker, self.parent, is_stopping=False, task_paths=["a.b", "c.d"], **values)

    @property
    def lost(self):
        return self.told.count({"cut": True})


@pytest.fixture
def started(eventually):
    with ExitStack() as stack:

        def start(*workers):
            fake = FakeWorkers(*(workers or [uuid4()]))
            heartbeat = Heartbeat("default", fake.parent, fake)
            stack.callback(lambda: heartbeat.wait(NEVER))
            stack.callback(heartbeat.stop)
            heartbeat.start()
            return heartbeat

        yield start


@pytest.fixture
def beating(started, eventually, settings):
    """Start a heartbeat that beats only when it is told to."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 600.0}

    def start(*workers):
        heartbeat = started(*workers)
        eventually(lambda: heartbeat.workers.written)
        return heartbeat

    return start


@pytest.fixture
def beat_once(eventually):
    def beat(heartbeat):
        """Beat now, and return the ids of the workers that were written."""
        before = len(heartbeat.workers.written)
        heartbeat.beat_soon()
        eventually(lambda: len(heartbeat.workers.written) > before)
        return heartbeat.workers.written[before]

    return beat


def test_one_statement_writes_the_rows_of_all_workers(beating, beat_once):
    heartbeat = beating(uuid4(), uuid4())
    rows = Worker.objects.order_by("id")
    assert [row.id for row in rows] == sorted(heartbeat.workers.ids)
    assert {row.parent for row in rows} == {heartbeat.parent}
    assert {row.lock_key for row in rows} == {heartbeat.lock_key}
    before = {row.id: row.heartbeat_at for row in rows}
    assert beat_once(heartbeat) == set(heartbeat.workers.ids)
    assert all(row.heartbeat_at > before[row.id] for row in rows.all())
    assert {tuple(row.task_paths) for row in rows.all()} == {("a.b", "c.d")}


def test_a_worker_that_has_just_been_started_has_its_row_at_once(beating, beat_once):
    heartbeat = beating()
    heartbeat.workers.ids.append(uuid4())
    assert beat_once(heartbeat) == set(heartbeat.workers.ids)
    assert Worker.objects.count() == 2


def test_a_worker_that_is_started_during_a_beat_has_its_row_at_once(beating, eventually):
    """The loop starts it right after the heartbeat has read which workers there are."""
    heartbeat = beating()
    workers, later = heartbeat.workers, uuid4()

    def beats():
        found = FakeWorkers.beats(workers)
        if later not in workers.ids:
            workers.ids.append(later)
            heartbeat.beat_soon()
        return found

    workers.beats = beats
    heartbeat.beat_soon()
    eventually(lambda: Worker.objects.filter(pk=later).exists())


def test_functions_are_sent_only_when_the_row_has_others(beating, beat_once):
    heartbeat = beating()
    [worker] = heartbeat.workers.ids
    assert heartbeat._complete(heartbeat.workers.beat_of(worker)).task_paths is None
    Worker.objects.update(task_paths=["a.b"])
    beat_once(heartbeat)
    assert heartbeat._complete(heartbeat.workers.beat_of(worker)).task_paths == ["a.b", "c.d"]


def test_a_row_that_was_deleted_is_written_again_soon(beating, monkeypatch, caplog, beat_once, eventually):
    monkeypatch.setattr(module, "LOCKED_PAUSE", 0.0)
    heartbeat = beating()
    Worker.objects.all().delete()
    assert beat_once(heartbeat) == set()
    eventually(lambda: heartbeat.workers.written[-1])
    assert Worker.objects.get().task_paths == ["a.b", "c.d"]
    assert "has locked its row" not in caplog.text


def test_a_locked_row_keeps_the_rows_of_others_from_nothing(beating, monkeypatch, caplog, beat_once, eventually):
    monkeypatch.setattr(module, "LOCKED_PAUSE", 0.0)
    first, second = uuid4(), uuid4()
    heartbeat = beating(first, second)
    other = dedicated_connection("default")
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM django_pglock_worker WHERE id = %s FOR UPDATE", [first])
            assert beat_once(heartbeat) == {second}
            eventually(lambda: "has locked its row" in caplog.text)
        eventually(lambda: heartbeat.workers.written[-1] == {first, second})
    finally:
        other.close()
    assert caplog.text.count("has locked its row") == 1
    assert not heartbeat.workers.lost


def test_a_row_that_is_locked_for_a_moment_is_not_worth_a_warning(beating, caplog, beat_once):
    """The worker itself locks it when it writes that it sleeps."""
    worker = uuid4()
    heartbeat = beating(worker)
    Worker.objects.update(task_paths=["a.b"])
    beat_once(heartbeat)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM django_pglock_worker WHERE id = %s FOR UPDATE", [worker])
        assert beat_once(heartbeat) == set()
    assert beat_once(heartbeat) == {worker}
    assert "has locked its row" not in caplog.text


def test_a_heartbeat_is_as_old_as_its_statement(beating, monkeypatch, beat_once):
    """A parent that was stopped while it waited for the answer must not regard its heartbeat as recent."""
    heartbeat = beating()
    monkeypatch.setattr(module, "BEAT", f"SELECT pg_sleep(0.2); {module.BEAT}")
    monkeypatch.setattr(heartbeat, "_ask", _skip_first_rows(heartbeat._ask))
    began = time.monotonic()
    beat_once(heartbeat)
    assert heartbeat.beat_at - began < 0.2 <= time.monotonic() - began


def _skip_first_rows(ask):
    def ask_without_sleep(*parts):
        limit, _, *rows = ask(*parts)
        return [limit, *rows]

    return ask_without_sleep


def test_a_parent_is_unbroken_only_while_its_beats_come(beating, settings, beat_once, eventually):
    heartbeat = beating()
    before = heartbeat.unbroken_for()
    beat_once(heartbeat)
    assert heartbeat.unbroken_for() > before
    heartbeat._unbroken_since -= 1000.0
    heartbeat.beat_at -= 10_000.0
    assert heartbeat.unbroken_for() == 0.0, "it was stopped, and does not know it yet"
    beat_once(heartbeat)
    assert heartbeat.unbroken_for() < 1000.0
    heartbeat._unbroken_since -= 1000.0
    terminate("heartbeat")
    eventually(lambda: heartbeat.workers.lost)
    eventually(lambda: heartbeat._connects == 2)
    beat_once(heartbeat)
    assert heartbeat.unbroken_for() < 1000.0, "the server may not have been there"


def held_locks():
    database = "(SELECT oid FROM pg_database WHERE datname = current_database())"
    held = f"SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND classid = %s AND database = {database}"
    return len(execute_sql(held, [WORKER]))


def test_the_lock_is_held_by_each_session_and_its_number_is_in_the_rows(beating, eventually):
    heartbeat = beating()
    assert AdvisoryLock.objects.filter(name=f"worker {Worker.objects.get().name}").count() == 1
    first = heartbeat.lock_key
    terminate("heartbeat")
    eventually(lambda: heartbeat.workers.lost)
    assert (heartbeat.lock_key, heartbeat.is_listening, heartbeat.is_connected) == (None, False, False)
    eventually(lambda: len(heartbeat.workers.written) > 1)
    assert heartbeat.lock_key != first
    assert Worker.objects.get().lock_key == heartbeat.lock_key
    assert held_locks() == 1
    assert heartbeat.workers.told.count({"poll": True}) == 2, "notifications may have been missed meanwhile"
    heartbeat.stop()
    eventually(lambda: held_locks() == 0)


def test_a_parent_whose_lock_number_is_taken_draws_another(beating, monkeypatch):
    """Numbers have 31 bits, so two parents may draw the same one. Or a half-open session still holds the lock."""
    numbers = iter([77, 77, 78])
    monkeypatch.setattr(module, "draw_number", lambda: next(numbers))
    session = dedicated_connection("default")
    try:
        with session.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s, 77)", (WORKER,))
        assert beating().lock_key == 78
    finally:
        session.close()


def test_behind_a_pooler_there_is_neither_lock_nor_notification(pooled, beating, beat_once):
    heartbeat = beating()
    assert (heartbeat.lock_key, heartbeat.is_listening, held_locks()) == (None, False, 0)
    assert Worker.objects.get().lock_key is None
    payload = f"{heartbeat.workers.ids[0]} 0 default"
    execute_sql("SELECT pg_notify(%s, %s)", [module.channel_of(heartbeat.parent), payload])
    beat_once(heartbeat)
    assert heartbeat.workers.wakes == []


def test_notifications_are_passed_on_and_nonsense_is_not(beating, caplog, eventually):
    heartbeat = beating()
    [worker] = heartbeat.workers.ids
    channel = module.channel_of(heartbeat.parent)
    for payload in (f"{worker} one default", "", "nonsense", f"{worker} 1 a queue with spaces"):
        execute_sql("SELECT pg_notify(%s, %s)", [channel, payload])
    woken = len(heartbeat.workers.upkeeps)
    execute_sql(f"SELECT pg_notify('{module.SCHEDULED_CHANNEL}', '')")
    eventually(lambda: len(heartbeat.workers.upkeeps) > woken)
    execute_sql(f"SELECT pg_notify('{module.SCHEDULED_CHANNEL}', 'blocked')")
    eventually(lambda: heartbeat.workers.upkeeps[-1])
    assert heartbeat.workers.wakes == [(str(worker), "a queue with spaces", 1)]
    assert not heartbeat.workers.lost


def run_for(worker, **fields):
    """Return a task that runs on a worker."""
    values = {"queue": "default", "backend": "default", "task_path": tasks.nothing.module_path, "attempts": 1}
    dates = {"started_at": Now(), "last_attempted_at": Now()}
    return Task.objects.create(status="RUNNING", worker=worker, **{**values, **dates, **fields})


def test_requests_come_with_a_notification_and_with_each_beat(beating, beat_once, eventually):
    heartbeat = beating()
    [worker] = heartbeat.workers.ids
    task = run_for(worker)
    Task.objects.filter(pk=task.pk).cancel()
    eventually(lambda: heartbeat.workers.requests)
    assert heartbeat.workers.requests == [(worker, {"cancel": [[task.pk, 1]]})]
    heartbeat.workers.requests.clear()
    beat_once(heartbeat)
    assert eventually(lambda: heartbeat.workers.requests) == [(worker, {"cancel": [[task.pk, 1]]})]


def test_a_stack_is_requested_and_answered(beating, beat_once, eventually, caplog):
    heartbeat = beating()
    [worker] = heartbeat.workers.ids
    task = run_for(worker)
    assert request_stack("default", task.pk)
    assert eventually(lambda: heartbeat.workers.requests) == [(worker, {"stack": [task.pk, 1]})]
    heartbeat.answer_stack(worker, task.pk, 1, "line 1\nline 2 % ' \\")
    answer = eventually(lambda: Task.objects.values_list("stack__text", flat=True).get())
    assert answer == "line 1\nline 2 % ' \\"
    beat_once(heartbeat)
    assert "was refused" not in caplog.text


def test_beats_are_written_while_the_table_of_tasks_is_locked(beating, beat_once, eventually):
    heartbeat = beating()
    task = run_for(heartbeat.workers.ids[0])
    before = Worker.objects.get().heartbeat_at
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE django_pglock_task IN ACCESS EXCLUSIVE MODE")
        assert beat_once(heartbeat) == set(heartbeat.workers.ids)
        execute_sql("SELECT pg_notify(%s, 'a request')", [module.channel_of(heartbeat.parent)])
        heartbeat.answer_stack(heartbeat.workers.ids[0], task.pk, 1, "text")
        assert beat_once(heartbeat) == set(heartbeat.workers.ids)
    assert Worker.objects.get().heartbeat_at > before
    assert not heartbeat.workers.lost
    Task.objects.filter(pk=task.pk).cancel()
    eventually(lambda: heartbeat.workers.requests)


def test_a_server_process_that_does_not_answer_costs_a_session(beating, beat_once, eventually, monkeypatch):
    """The server cannot end a statement itself while its process is stopped."""
    heartbeat = beating()
    monkeypatch.setattr(Heartbeat, "statement_timeout", 0.1)
    [stopped] = sessions("heartbeat")
    os.kill(stopped, signal.SIGSTOP)
    try:
        heartbeat.beat_soon()

        def has_another():
            heartbeat.trouble()
            return set(sessions("heartbeat")) - {stopped}

        eventually(has_another, why="it waits for the answer")
        beat_once(heartbeat)
    finally:
        os.kill(stopped, signal.SIGCONT)


def test_nothing_happens_before_pending_migrations_are_applied(started, eventually, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(module, "pending_migrations", lambda using: ["0001_initial"])
        heartbeat = started()
        eventually(lambda: heartbeat.last_error)
        assert "migrations of django_pglock are pending (0001_initial). Run: manage.py mig" in heartbeat.why_not_ready()
        assert not heartbeat.workers.written
    eventually(lambda: heartbeat.workers.written)
    assert caplog.text.count("tries again: migrations of django_pglock are pending (0001_initial).") == 1


# With a child.


def test_an_idle_worker_is_woken_by_the_commit_and_not_before(worker, eventually, settings):
    """Without the notification, the worker would sleep for ten minutes."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0, "HEARTBEAT_INTERVAL": 600.0}
    worker()
    eventually(lambda: Worker.objects.filter(is_sleeping=True).exists())
    time.sleep(0.3)
    with transaction.atomic():
        result = tasks.nothing.enqueue()
        time.sleep(0.2)
        assert Task.objects.get(pk=result.id).status == "READY"
    eventually(lambda: Task.objects.filter(pk=result.id, status="SUCCESSFUL").exists(), why="it was not woken")


def test_a_worker_whose_row_was_removed_is_woken_again_soon(worker, eventually):
    """As when the worker was frozen for too long. The next heartbeat writes the row anew, with the flag for sleep."""
    sleeps = Worker.objects.filter(is_sleeping=True)
    worker()
    eventually(sleeps.exists)
    Worker.objects.all().delete()
    eventually(sleeps.exists, why="it does not ask for news any more")


def test_tasks_that_come_while_the_session_that_listens_is_ended_are_found(worker, eventually, settings):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}
    worker()
    eventually(lambda: Worker.objects.filter(is_sleeping=True).exists())
    terminate("heartbeat")
    tasks.nothing.enqueue()
    eventually(lambda: Task.objects.get().status == "SUCCESSFUL")


def test_polling_finds_a_cancel_without_a_notification(pooled, worker, eventually):
    worker()
    result = running_tasks.run_sql.enqueue()
    wait_until_begun(eventually)
    Task.objects.cancel()
    assert wait_for_end(result, eventually).status == "CANCELLED"


def test_a_claim_that_waits_for_its_thread_does_not_begin(worker, eventually, claim, monkeypatch):
    """Several claims are in flight, and the only thread is busy."""
    monkeypatch.setattr("django_pglock.worker.child.feeder.LONGEST_WAIT", running_tasks.FOREVER)
    process = worker(queues=["another"], threads=1)
    # A feeder that has just connected gives unknown claims back.
    eventually(lambda: Worker.objects.filter(is_sleeping=True).exists())
    tasks.record.enqueue("never")
    [waits] = claim(worker=process.id)
    running_tasks.wait_for_note.enqueue("go on")
    [busy] = claim(worker=process.id)
    process.in_flight.begin_all([busy, waits])
    Task.objects.filter(pk=waits.id).cancel()
    eventually(lambda: waits.is_cancelled, why="it has not heard of it")
    running_tasks.note("go on")
    eventually(lambda: Task.objects.filter(pk=waits.id, status="CANCELLED").exists())
    assert not Effect.objects.filter(name="never").exists()
    assert Attempt.objects.get(task=waits.id).exception_path == "django_pglock.errors.TaskCancelled"
    eventually(lambda: Task.objects.filter(pk=busy.id, status="SUCCESSFUL").exists())
