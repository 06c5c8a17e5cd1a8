"""Probes and metrics of a worker over HTTP."""

from __future__ import annotations

import logging
import math
import re
import socket
import threading
import time
from contextlib import ExitStack
from http.client import HTTPConnection

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection
from django.db.models import F
from django.db.models.functions import Now
from django.test import override_settings

from django_pglock.errors import ConfigurationError
from django_pglock.models import Queue, QueueCount, Task
from django_pglock.worker import service
from django_pglock.worker.probes import health
from django_pglock.worker.probes import http_server as probes
from django_pglock.worker.probes.server import ProbeServer
from django_pglock.worker.supervising.channel import REPLACE, SupervisorSockets
from django_pglock.worker.upkeep import queue_counts
from tests.conftest import NEVER
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect
from tests.sample.running_tasks import FOREVER

pytestmark = pytest.mark.django_db(transaction=True)

PARTS = ("heartbeat", "settler", "upkeep", "fetcher")
ENDS = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
LABEL = r'[a-z]+="(?:[^"\\\n]|\\.)*"'
SAMPLE = re.compile(rf"(django_pglock_[a-z_]+)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (-?[0-9.e-]+)")


def ask(worker, path, method="GET"):
    client = HTTPConnection("127.0.0.1", worker.probes.server.port, timeout=60)
    try:
        client.request(method, path)
        answer = client.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        client.close()


def metrics(worker):
    """Ask for the metrics and return them by name, or by name and label. Each line has to be one of the format."""
    status, text, headers = ask(worker, "/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    samples, kinds = {}, {}
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert name not in kinds
            assert (kind == "counter") == name.endswith("_total")
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            name, labels, number = SAMPLE.fullmatch(line).groups()
            assert kinds[name if name in kinds else re.sub("_(bucket|sum|count)$", "", name)]
            values = re.sub(r'="((?:[^"\\]|\\.)*)"', r"=\1", labels or "")
            samples[f"{name.removeprefix('django_pglock_')} {values}".rstrip()] = float(number)
    return samples


@pytest.fixture
def probed(worker):
    def start(**options):
        return worker(probe_port=0, probe_host="127.0.0.1", **options)

    return start


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


def test_a_worker_answers_probes(probed, eventually):
    worker = probed()
    assert ask(worker, "/livez")[:2] == (200, "ok\n")
    eventually(lambda: ask(worker, "/readyz?verbose")[:2] == (200, "ok\n"))
    status, body, headers = ask(worker, "/livez", "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, "", "3")
    assert ask(worker, "/")[:2] == (404, "There are /livez, /readyz and /metrics.\n")
    assert ask(worker, "/livez", "POST")[0] == 501
    assert "Python" not in headers["Server"]


def test_nothing_listens_unless_a_port_is_asked_for(worker):
    assert worker().probes.server is None


def test_a_worker_refuses_to_start_if_its_probe_port_is_taken(worker):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot be answered at 127.0.0.1 port {port}"):
            worker(probe_port=port, probe_host="127.0.0.1")
        with pytest.raises(CommandError, match="cannot be answered"):
            call_command("runlockworker", "--probe-port", str(port), "--probe-host", "127.0.0.1", "--no-reload")


@pytest.mark.parametrize(("number", "port"), [(1, 9187), (4, 9190)])
def test_each_process_of_a_supervisor_has_a_port_of_its_own(number, port):
    assert ProbeServer(None, None, host="127.0.0.1", port=9187, number=number).port == port
    assert ProbeServer(None, None, host="127.0.0.1", port=0, number=number).port == 0


@pytest.fixture
def channel(closing):
    ours, theirs = map(closing.enter_context, socket.socketpair())
    return SupervisorSockets(1, theirs), ours


def test_a_process_that_is_replaced_leaves_its_port_to_the_other(probed, channel):
    """They overlap: the old one drains while the new one starts."""
    worker = probed(supervisor=channel[0])
    worker.retire()
    heard = channel[1].recv(100)
    assert REPLACE in heard
    with socket.create_server(("127.0.0.1", worker.probes.server.port)):
        pass


def test_a_worker_that_drains_lives_and_is_not_ready(probed, eventually):
    worker = probed()
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    draining = threading.Thread(target=worker.shutdown)
    draining.start()
    eventually(lambda: worker.heartbeat.is_draining)
    assert ask(worker, "/readyz")[:2] == (503, "The worker is stopping.\n")
    assert ask(worker, "/livez")[0] == 200
    running_tasks.note("go on")
    draining.join(60)
    assert Task.objects.get().status == "SUCCESSFUL"
    with pytest.raises(ConnectionRefusedError):
        ask(worker, "/livez")


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_stuck_is_named(probed, eventually, monkeypatch, name):
    worker = probed()
    part = getattr(worker, name)
    end = threading.Event()
    monkeypatch.setattr(part, "run_once", lambda: end.wait(FOREVER))
    monkeypatch.setattr(health, "STUCK_AFTER", 0.05)
    part.wake()
    text = rf"The {name} has not responded for \d+ s.\n"
    try:
        eventually(lambda: re.fullmatch(text, ask(worker, "/livez")[1]), why="it was not named")
        assert ask(worker, "/livez")[0] == 503
        assert ask(worker, "/readyz")[0] == 503
    finally:
        monkeypatch.undo()
        end.set()
    eventually(lambda: ask(worker, "/livez")[0] == 200)


@ENDS
@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_has_ended_is_named(probed, eventually, monkeypatch, name):
    worker = probed()
    monkeypatch.setattr(getattr(worker, name), "_run_once_or_back_off", lambda: exec("raise SystemExit"))
    getattr(worker, name).wake()
    eventually(lambda: ask(worker, "/livez")[:2] == (503, f"The {name} has ended.\n"))


def test_a_thread_for_tasks_that_has_ended_is_named(probed, eventually):
    worker = probed()
    worker.in_flight.threads.inbox.put(None)
    eventually(lambda: ask(worker, "/livez")[:2] == (503, "A thread of the executor has ended.\n"))


SLOW = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 1000.0, "HEARTBEAT_LIMIT": 3000.0, "POLL_INTERVAL": 1000.0}


@override_settings(DJANGO_PGLOCK=SLOW)
def test_a_part_that_sleeps_is_not_stuck(probed, eventually):
    """A service that waits has reported for how long it will be silent."""
    worker = probed()
    tasks.nothing.using(timeout=1000).enqueue()
    eventually(lambda: worker.settler.counts.total() == 1)
    lookers = (worker.deadlines, worker.session_watch)
    sleepers = [part for part in worker.services if part not in lookers]
    eventually(lambda: all(part.next_report_by > time.monotonic() + 10 for part in sleepers))
    assert all(part.is_running for part in worker.services)


def test_a_part_that_is_too_busy_to_sleep_is_not_stuck(eventually, monkeypatch):
    part = service.Service()
    monkeypatch.setattr(part, "run_once", lambda: None)
    part.start()
    try:
        first = eventually(lambda: part.next_report_by < math.inf and part.next_report_by)
        eventually(lambda: part.next_report_by > first)
    finally:
        part.stop()
    assert part.wait(60)


def test_a_service_that_waits_for_a_silent_server_is_not_stuck(eventually, monkeypatch):
    """Connecting takes as long as the settings of the client allow. A restart of the process would not shorten it."""
    end = threading.Event()

    class Silent:
        def ensure_connection(self):
            end.wait(FOREVER)
            raise OperationalError("no answer")

        connection, execute_wrappers = None, []

        def close(self):
            pass

    monkeypatch.setattr(service, "dedicated_connection", lambda *_, **__: Silent())
    part = service.ConnectedService("default")
    part.start()
    eventually(lambda: part.next_report_by == math.inf)
    part.stop()
    end.set()
    assert part.wait(60)


def test_without_a_database_a_worker_lives_and_is_not_ready(probed, eventually, monkeypatch):
    def refuse(*_, **__):
        raise OperationalError("secret.example refuses")

    worker = probed()
    eventually(lambda: ask(worker, "/readyz")[0] == 200)
    before = metrics(worker)
    monkeypatch.setattr(service, "dedicated_connection", refuse)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name LIKE 'lockworker %%' AND datname = current_database()"
        )
    eventually(lambda: ask(worker, "/readyz")[:2] == (503, "The worker has no connection to the database.\n"))
    assert ask(worker, "/livez")[0] == 200
    monkeypatch.undo()
    eventually(lambda: ask(worker, "/readyz")[0] == 200)
    name = "reconnects_total part=heartbeat"
    assert (before[name], metrics(worker)[name]) == (0, 1)


@override_settings(DJANGO_PGLOCK={**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 0.1, "HEARTBEAT_LIMIT": 0.5})
def test_a_heartbeat_that_cannot_be_written_is_seen(probed, eventually, monkeypatch):
    """The session is there, but its server does not answer any more."""
    worker = probed()
    eventually(lambda: ask(worker, "/readyz")[0] == 200)
    end = threading.Event()
    monkeypatch.setattr(worker.heartbeat, "run_once", lambda: end.wait(FOREVER))
    eventually(lambda: re.fullmatch(r"The last heartbeat was written \d+ s ago.\n", ask(worker, "/readyz")[1]))
    end.set()


def test_outcomes_of_claims_are_counted(probed, eventually, monkeypatch):
    # Otherwise a claim that waits for long counts twice.
    monkeypatch.setattr("django_pglock.worker.claiming.fetcher.LONGEST_WAIT", FOREVER)
    worker = probed()
    for call in (tasks.nothing, tasks.nothing, tasks.fail_twice, tasks.fail_for_good):
        call.enqueue(*["a"] * (call is tasks.fail_twice))
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.filter(name="waits").exists())
    Task.objects.filter(task_path__endswith="wait_for_note").update(attempts=F("attempts") + 1)
    running_tasks.note("go on")

    eventually(lambda: metrics(worker)["outcomes_total outcome=succeeded"] >= 3)
    # The outcome is counted when it is written. The claim is removed right after.
    found = eventually(
        lambda: (found := metrics(worker))["claims_lost_total"] and not found["tasks_in_flight"] and found
    )
    counts = {name.partition("=")[2]: found[name] for name in found if name.startswith("outcomes_total")}
    others = dict.fromkeys(("snoozed", "cancelled", "interrupted", "given_back", "abandoned"), 0)
    assert counts == {"succeeded": 3, "retried": 2, "failed": 1, **others}
    assert (found["claims_total"], found["claims_lost_total"]) == (7, 1)
    assert (found["threads"], found["worker_ready"]) == (2, 1)
    assert (found["tasks_in_flight"], found["tasks_running"], found["outcomes_waiting"]) == (0, 0, 0)
    assert 0 <= found["heartbeat_age_seconds"] < NEVER


def test_attempts_are_counted_by_function_with_their_times(probed, eventually):
    worker = probed()
    tasks.nothing.using(queue_name="mail").enqueue()
    tasks.fail_twice.enqueue("a")
    eventually(lambda: not Task.objects.filter(finished_at=None).exists())
    path = "function=tests.sample.tasks.fail_twice"
    name = f"attempts_total queue=default,{path}"
    found = eventually(lambda: (found := metrics(worker)).get(f"{name},outcome=succeeded") and found)
    assert (found[f"{name},outcome=retried"], found[f"{name},outcome=failed"]) == (2, 0)
    assert found["attempts_total queue=mail,function=tests.sample.tasks.nothing,outcome=succeeded"] == 1
    times = f"task_run_seconds_bucket queue=default,{path},le="
    buckets = [found[key] for key in found if key.startswith(times)]
    assert buckets == sorted(buckets)
    assert [key.removeprefix(times) for key in found if key.startswith(times)][:3] == ["0.001", "0.004", "0.016"]
    assert found[f"{times}+Inf"] == found[f"task_run_seconds_count queue=default,{path}"] == 3
    assert 0 < found[f"task_run_seconds_sum queue=default,{path}"] < NEVER
    assert found[f"task_wait_seconds_count queue=default,{path}"] == 1
    worker.settler.history._write_at = 0.0
    worker.settler.wake()
    eventually(lambda: worker.settler.history.due_in() is None)
    assert metrics(worker)[f"{name},outcome=succeeded"] == 1, "counters grow on after they were written"


def test_metrics_count_the_tasks_in_flight(probed, eventually):
    worker = probed(threads=1)
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    found = metrics(worker)
    running_tasks.note("go on")
    assert (found["tasks_in_flight"], found["tasks_running"]) == (1, 1)


def test_the_upkeep_counts_queues_while_metrics_are_requested(probed, eventually, monkeypatch):
    worker = probed(queues=["other"])
    read = []
    shared = queue_counts.shared_counts
    monkeypatch.setattr(queue_counts, "shared_counts", lambda using: read.append(1) or shared(using))
    for _ in range(3):
        tasks.nothing.using(queue_name='an "odd\\one" 9%s').enqueue()
    Queue.objects.pause("mail")
    worker.upkeep.queue_counts.run_if_due()
    assert not read, "counted before anybody asked"

    odd = 'queue=an \\"odd\\\\one\\" 9%s'
    eventually(lambda: metrics(worker).get(f"tasks_ready {odd}") == 3, why="it was not counted")
    found = metrics(worker)
    assert 0 < found[f"oldest_ready_task_age_seconds {odd}"] < NEVER
    statuses = ("ready", "blocked", "scheduled", "running", "failed")
    assert [found[f"tasks {odd},status={status}"] for status in statuses] == [3, 0, 0, 0, 0]
    assert (found[f"queue_paused {odd}"], found["queue_paused queue=mail"]) == (0, 1)
    for _ in range(20):
        metrics(worker)
        worker.upkeep.queue_counts.run_if_due()
    assert len(read) == 1
    monkeypatch.setattr("django_pglock.worker.upkeep.queue_counts.BETWEEN_COUNTS", 0.1)
    Task.objects.all().delete()
    QueueCount.objects.update(count_again_at=Now())
    eventually(lambda: metrics(worker)[f"tasks_ready {odd}"] == 0, why="an empty queue is shown as such")
    monkeypatch.setattr("django_pglock.worker.upkeep.queue_counts.MAX_AGE_FOR_METRICS", 0.0)
    assert f"tasks_ready {odd}" not in metrics(worker)


def test_scrapes_send_no_statement(probed, django_assert_num_queries):
    worker = probed()
    with django_assert_num_queries(0):
        worker.probes.metrics.exposition()


def test_slow_clients_are_cut_off_and_block_no_others(probed, eventually, monkeypatch, closing):
    """Clients that send nothing, and clients that send a byte now and then. Neither kind keeps a thread."""
    monkeypatch.setattr(probes, "LONGEST_REQUEST", NEVER)
    worker = probed()
    server = worker.probes.server._server
    address = ("127.0.0.1", worker.probes.server.port)
    clients = [closing.enter_context(socket.create_connection(address)) for _ in range(probes.MOST_REQUESTS + 4)]
    eventually(lambda: len(server._requests) == probes.MOST_REQUESTS)
    assert ask(worker, "/livez")[0] == 200
    monkeypatch.setattr(probes, "LONGEST_REQUEST", 1.0)
    trickle, begun = clients[-1], time.monotonic()
    with pytest.raises(OSError, match=r".+"):
        while time.monotonic() - begun < NEVER:
            trickle.send(b"G")
            time.sleep(0.05)
    for client in clients[:-1]:
        client.settimeout(60)
        assert client.recv(1) == b"", "it was not cut off"
    eventually(lambda: not server._requests)
    assert ask(worker, "/livez")[0] == 200


def test_a_client_that_hangs_up_is_no_error(probed, eventually, caplog, capfd):
    worker = probed()
    for _ in range(3):
        client = socket.create_connection(("127.0.0.1", worker.probes.server.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.send(b"GET /metrics HTTP/1.0\r\n")
        client.close()
    eventually(lambda: not worker.probes.server._server._requests)
    assert ask(worker, "/livez")[0] == 200
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert capfd.readouterr().err == ""
