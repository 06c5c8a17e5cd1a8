"""The heartbeat that a supervisor shares among its processes, with workers in threads of this process."""

from __future__ import annotations

import json
import socket
import time
from uuid import UUID, uuid4

import pytest
from django.db import OperationalError, connection
from django.test import override_settings

from django_pglock.keys.reserved import WORKER
from django_pglock.models import Task
from django_pglock.models import Worker as WorkerRow
from django_pglock.postgres import sessions
from django_pglock.worker import service
from django_pglock.worker.liveness import json_lines, timing
from django_pglock.worker.liveness.json_lines import JsonLines
from django_pglock.worker.liveness.supervisor_heartbeat import SupervisorHeartbeat
from django_pglock.worker.supervising import shared_heartbeat
from django_pglock.worker.supervising.channel import SupervisorSockets
from django_pglock.worker.supervising.shared_heartbeat import SharedHeartbeat
from tests.proxy import Proxy
from tests.sample import running_tasks, tasks
from tests.settings import DJANGO_PGLOCK
from tests.settings_slow_beats import DJANGO_PGLOCK as SLOW_BEATS

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


def test_the_thread_of_the_heartbeat_opens_no_session(supervised, eventually, monkeypatch):
    """Neither for running tasks nor for the heartbeat process: opening a session may take longer than others wait."""
    running = supervised()
    eventually(lambda: answers(SESSIONS, OWN) == [0], why="it keeps a session that it does not need")
    eventually(lambda: running.health.unready() is None)
    monkeypatch.setattr("django_pglock.worker.liveness.heartbeat_process.INSTRUCT_AGAIN_AFTER", 0.5)
    opened, instructed = [], []
    take, renew = running.heartbeat._take, running.heartbeat.process._instructions
    monkeypatch.setattr(running.heartbeat, "_take", lambda: (opened.append(1), take())[1])
    monkeypatch.setattr(running.heartbeat.process, "_instructions", lambda: (instructed.append(1), renew())[1])
    running_tasks.ask.enqueue()
    eventually(lambda: Task.objects.filter(status="RUNNING").exists())
    eventually(lambda: len(instructed) > 1, why="the heartbeat process keeps an old password")
    newest = running.heartbeat.process._newest
    eventually(lambda: running.heartbeat.process._sent is not newest, why="it does not get the new instructions")
    Task.objects.cancel()
    eventually(lambda: Task.objects.get().status == "CANCELLED", why="nobody looks whether it is to be cancelled")
    assert running.health.hung() is None
    assert (opened, running.heartbeat.reconnects) == ([], 0)


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


def test_a_worker_whose_supervisor_has_ended_beats_by_itself(supervised, shared, eventually):
    running = supervised()
    eventually(lambda: holder(running.identity.id) == SHARED)
    shared.stop()
    assert shared.wait(30)
    eventually(lambda: holder(running.identity.id) == OWN, why="nobody holds its lock")
    eventually(running.heartbeat.is_listening, why="it does not listen")
    tasks.record.enqueue("runs")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists())


@override_settings(DJANGO_PGLOCK=SLOW_BEATS)
def test_the_end_of_the_supervisor_is_noticed_at_once(supervised, shared, eventually):
    running = supervised()
    eventually(lambda: holder(running.identity.id) == SHARED)
    shared.stop()
    assert shared.wait(30)
    eventually(lambda: holder(running.identity.id) == OWN, why="it waits for its next beat, ten minutes from now")


def test_a_worker_beats_by_itself_until_the_supervisor_can_again(supervised, eventually, monkeypatch):
    running = supervised()
    eventually(lambda: holder(running.identity.id) == SHARED)

    def fail(using, beats):
        raise OperationalError("as without a network")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(shared_heartbeat, "beat_all", fail)
            eventually(lambda: holder(running.identity.id) == OWN, why="nobody holds its lock")
        eventually(lambda: holder(running.identity.id) == SHARED, why="the supervisor does not beat again")
    assert running.heartbeat.reconnects == 0


def test_a_worker_beats_by_itself_while_the_supervisor_is_silent(supervised, eventually, monkeypatch):
    """As while the supervisor is stopped. After its late answer, the supervisor beats again."""
    running = supervised()
    eventually(lambda: holder(running.identity.id) == SHARED)
    beat_all = shared_heartbeat.beat_all

    def hang(using, beats):
        eventually(lambda: holder(running.identity.id) == OWN, why="it waits for the supervisor for too long")
        return beat_all(using, beats)

    with monkeypatch.context() as patch:
        patch.setattr(shared_heartbeat, "beat_all", hang)
        eventually(lambda: holder(running.identity.id) == OWN)
        alone = WorkerRow.objects.get().beating_since
    eventually(lambda: holder(running.identity.id) == SHARED and answers(SESSIONS, OWN) == [0])
    assert WorkerRow.objects.get().beating_since > alone, "these beats come from another session"


def test_the_supervisor_beats_again_although_a_new_session_hangs(supervised, eventually, monkeypatch):
    """A pooler is paused: the supervisor could not beat for a moment, and its process waits for its own session."""
    running = supervised()
    eventually(lambda: holder(running.identity.id) == SHARED)
    with Proxy.before(connection) as paused, monkeypatch.context() as patch:
        paused.hold_new()

        def dedicated_connection(*args, **options):
            session = sessions.dedicated_connection(*args, **options)
            session.settings_dict.update(HOST="127.0.0.1", PORT=paused.port)
            session.settings_dict["OPTIONS"]["connect_timeout"] = 600
            return session

        def hang(using, beats):
            eventually(lambda: paused.links, why="its process does not try to beat by itself")
            return beat_all(using, beats)

        beat_all = shared_heartbeat.beat_all
        patch.setattr(service, "dedicated_connection", dedicated_connection)
        patch.setattr(shared_heartbeat, "beat_all", hang)
        eventually(lambda: paused.links, why="its process does not try to beat by itself")
        patch.setattr(shared_heartbeat, "beat_all", beat_all)
        eventually(lambda: running.heartbeat._supervisor_beats, why="the supervisor does not beat")
    assert holder(running.identity.id) == SHARED


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


def test_a_heartbeat_request_that_is_read_late_writes_no_heartbeat(end, eventually):
    """The supervisor was stopped, and the process may have been, too."""
    lines = JsonLines(end)
    lines.send(request(asked_at=time.monotonic() - 2 * DJANGO_PGLOCK["HEARTBEAT_INTERVAL"]))
    assert next_message(lines, eventually) == {"can_beat": True}
    assert not WorkerRow.objects.exists()


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


def test_no_notification_is_sent_after_the_exchange_has_ended(monkeypatch):
    """Otherwise each notification would wait for a process that reads nothing, and no process would get a heartbeat."""
    monkeypatch.setattr(json_lines, "READ_WITHIN", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lines = JsonLines(ours)
        while not lines.is_over:
            lines.send({"filling": "x" * 10_000})
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            while theirs.recv(65536):
                pass
        lines.send({"more": 1})
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def test_a_message_of_another_version_ends_only_its_own_exchange(channels, supervised, shared, eventually):
    running = supervised()
    eventually(lambda: holder(running.identity.id) == SHARED)
    for sent in (b"garbage\n", b"[]\n", b"{}\n", {"new_field": 1}, {"id": "?"}, {"asked_at": None}):
        ours, end = socket.socketpair()
        channels.append(end)
        shared.add(ours)
        eventually(lambda: len(shared._clients) == 2)
        end.send(sent if isinstance(sent, bytes) else json.dumps(request(**sent)).encode() + b"\n")
        eventually(lambda: len(shared._clients) == 1, why=f"the exchange goes on after {sent!r}")
        assert holder(running.identity.id) == SHARED
        assert shared.is_running


@override_settings(DJANGO_PGLOCK=SLOW_BEATS)
def test_a_single_request_waits_only_briefly_for_others(end, shared, eventually, monkeypatch):
    monkeypatch.setattr(timing, "GATHERED_WITHIN", 0.0)
    other, its_end = socket.socketpair()
    shared.add(other)
    with its_end:
        lines = JsonLines(end)
        lines.send(request())
        assert 0 < next_message(lines, eventually)["next_in"] <= SLOW_BEATS["HEARTBEAT_INTERVAL"]


def test_the_shared_heartbeat_is_sent_as_soon_as_all_processes_have_requested_it(end, eventually, monkeypatch):
    monkeypatch.setattr(timing, "GATHERED_WITHIN", 10_000.0)
    lines = JsonLines(end)
    lines.send(request())
    assert "beaten" in next_message(lines, eventually)


def test_beats_in_one_session_are_continuous(end, eventually):
    lines, sent = JsonLines(end), request()
    since = set()
    for _ in range(3):
        lines.send({**sent, "asked_at": time.monotonic()})
        assert "beaten" in next_message(lines, eventually)
        since.add(WorkerRow.objects.get().beating_since)
    assert len(since) == 1
    lines.send({**sent, "asked_at": time.monotonic(), "is_interrupted": True})
    assert "beaten" in next_message(lines, eventually)
    assert WorkerRow.objects.get().beating_since not in since, "the beats before came from another session"


def test_a_failed_beat_is_answered_at_once(end, eventually, monkeypatch):
    def fail(using, beats):
        raise OperationalError("as without a network")

    monkeypatch.setattr(shared_heartbeat, "beat_all", fail)
    lines = JsonLines(end)
    lines.send(request())
    assert next_message(lines, eventually) == {"can_beat": False}


def test_a_supervisor_behind_a_pooler_beats_without_lock_and_notifications(eventually):
    service = SharedHeartbeat("default", is_pooled=True)
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


def test_a_heartbeat_ends_when_the_other_end_is_closed():
    ours, theirs = socket.socketpair()
    heartbeat = SupervisorHeartbeat(theirs, on_notification=print, on_missed_notifications=print)
    assert heartbeat.is_up
    ours.close()
    heartbeat.receive()
    assert (heartbeat.is_up, heartbeat.is_over) == (False, True)
    heartbeat.close()
