"""The heartbeat that a supervisor shares among its processes, with workers in threads of this process."""

from __future__ import annotations

import socket
import time
from uuid import UUID, uuid4

import pytest
from django.db import connection
from django.test import override_settings

from django_pglock.keys.reserved import WORKER
from django_pglock.models import Task
from django_pglock.models import Worker as WorkerRow
from django_pglock.worker.liveness.supervisor_heartbeat import JsonLines
from django_pglock.worker.supervising import shared_heartbeat
from django_pglock.worker.supervising.channel import SupervisorSockets
from django_pglock.worker.supervising.shared_heartbeat import SharedHeartbeat
from tests.sample import running_tasks, tasks
from tests.settings import DJANGO_PGLOCK

pytestmark = pytest.mark.django_db(transaction=True)

HOLDER = """
SELECT activity.application_name FROM pg_locks JOIN pg_stat_activity AS activity USING (pid)
WHERE locktype = 'advisory' AND objsubid = 2 AND classid = %s AND objid = %s
"""
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
END_SESSION = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = %s
"""
SHARED, OWN = "lockworker shared heartbeat", "lockworker heartbeat"


def answers(statement: str, *values: object) -> list[object]:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return [value for (value,) in cursor.fetchall()]


def holder(worker: UUID) -> object:
    """Return which session holds the lock in the row of the worker."""
    row = WorkerRow.objects.filter(pk=worker).first()
    return None if row is None else next(iter(answers(HOLDER, WORKER, row.lock_key)), None)


@pytest.fixture
def shared():
    """A heartbeat as the supervisor runs it."""
    service = SharedHeartbeat("default")
    service.start()
    yield service
    service.stop()
    assert service.wait(30)


@pytest.fixture
def channels():
    """Both ends of the channels of all workers, closed after the workers have ended."""
    made = []
    yield made
    for end in made:
        end.close()


@pytest.fixture
def supervised(channels, worker, shared):
    """Start a worker for which the shared heartbeat beats."""

    def start(**options):
        heartbeat_socket, its_heartbeat_socket = socket.socketpair()
        channel, its_channel = socket.socketpair()
        channels.extend([channel, its_channel])
        shared.add(heartbeat_socket)
        return worker(supervisor=SupervisorSockets(1, its_channel, its_heartbeat_socket), **options)

    return start


@pytest.fixture
def batches(monkeypatch):
    """The workers for which each statement of the shared heartbeat beats."""
    found = []
    beat_all = shared_heartbeat.beat_all
    monkeypatch.setattr(
        shared_heartbeat,
        "beat_all",
        lambda using, beats: (found.append({beat.id for beat in beats}), beat_all(using, beats))[1],
    )
    return found


def test_one_statement_writes_the_heartbeats_of_all_processes_of_a_supervisor(supervised, batches, eventually):
    ids = {supervised().identity.id for _ in range(3)}
    eventually(lambda: batches and batches[-1] == ids, why="they never beat together")
    at = WorkerRow.objects.values_list("heartbeat_at", flat=True)
    earlier = set(at.all())
    eventually(lambda: not earlier & set(at.all()), why="some worker beats no more")
    assert {holder(each) for each in ids} == {SHARED}


@override_settings(DJANGO_PGLOCK={**DJANGO_PGLOCK, "POLL_INTERVAL": 600.0})
def test_the_shared_session_passes_notifications_on(supervised, eventually):
    running = supervised()
    eventually(running.heartbeat.is_listening)
    eventually(lambda: WorkerRow.objects.filter(is_sleeping=True).exists())
    time.sleep(0.2)
    tasks.record.enqueue("heard")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists(), why="the notification did not reach it")
    assert answers(SESSIONS, SHARED) == [1]


def test_a_running_task_is_cancelled(supervised, eventually):
    supervised()
    running_tasks.run_sql.enqueue()
    eventually(lambda: Task.objects.filter(status="RUNNING").exists())
    Task.objects.cancel()
    eventually(lambda: Task.objects.get().status == "CANCELLED")


def test_when_the_shared_session_is_lost_the_next_one_holds_the_locks(supervised, eventually):
    ids = [supervised().identity.id for _ in range(2)]
    eventually(lambda: [holder(each) for each in ids] == [SHARED] * 2)
    before = WorkerRow.objects.get(pk=ids[0]).beating_since
    answers(END_SESSION, SHARED)
    eventually(
        lambda: WorkerRow.objects.get(pk=ids[0]).beating_since > before and holder(ids[0]) == holder(ids[1]) == SHARED,
        why="the beats do not continue, or are said to have been continuous",
    )


def request(**values):
    """A request for a heartbeat, as a process sends it."""
    queues = {"queues": [], "threads": 1, "is_stopping": False, "is_interrupted": False, "task_paths": []}
    return {
        "id": str(uuid4()),
        "name": "n",
        "hostname": "h",
        "pid": 1,
        "asked_at": time.monotonic(),
        **queues,
        **values,
    }


@pytest.fixture
def end(shared):
    """The end of a heartbeat socket that belongs to a process."""
    ours, theirs = socket.socketpair()
    shared.add(ours)
    with theirs:
        yield theirs


def next_message(lines, eventually):
    return eventually(lines.receive)[0]


def test_the_lock_of_a_process_that_has_died_is_released(end, eventually):
    lines, sent = JsonLines(end), request()
    lines.send(sent)
    assert next_message(lines, eventually)["is_listening"] is True
    assert holder(UUID(sent["id"])) == SHARED
    end.close()
    eventually(lambda: holder(UUID(sent["id"])) is None, why="a session still holds its lock")


def test_a_process_that_does_not_read_blocks_no_other_and_keeps_its_lock(end, supervised, eventually):
    """The process is stopped, or a task blocks its threads. Without its lock, its worker would count as dead."""
    running = supervised()
    lines, sent = JsonLines(end), request()
    lines.send(sent)
    assert next_message(lines, eventually)["is_listening"] is True
    answers("SELECT pg_notify('django_pglock_ready', repeat('x', 7000) || i)::text FROM generate_series(1, 100) AS i")
    answers("SELECT pg_notify('django_pglock_ready', 'q' || i)::text FROM generate_series(1, 600) AS i")
    before = WorkerRow.objects.get(pk=running.identity.id).heartbeat_at
    eventually(
        lambda: WorkerRow.objects.get(pk=running.identity.id).heartbeat_at > before,
        why="the other worker does not beat any more",
    )
    assert holder(running.identity.id) == holder(UUID(sent["id"])) == SHARED
    # When the process reads again, it learns that it has missed notifications, and gets heartbeats.
    eventually(lambda: {"can_beat": True} in lines.receive(), why="it was not told what it has missed")
    lines.send(request(id=sent["id"]))
    eventually(lambda: any("beaten" in each for each in lines.receive()), why="nobody beats for it any more")


def test_a_supervisor_behind_a_pooler_beats_without_lock_and_notifications(pooled, eventually):
    service = SharedHeartbeat("default")
    service.start()
    try:
        ours, theirs = socket.socketpair()
        service.add(ours)
        with theirs:
            lines, sent = JsonLines(theirs), request()
            lines.send(sent)
            assert next_message(lines, eventually)["is_listening"] is False
            assert WorkerRow.objects.get().lock_key is None
    finally:
        service.stop()
        assert service.wait(30)
