"""Probes of a worker with several children."""

from __future__ import annotations

import signal
import socket
from contextlib import closing
from http.client import HTTPConnection

import pytest

from django_pglock.models import Task
from tests.conftest import NEVER
from tests.sample import running_tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.acceptance


def is_ready(port):
    with closing(HTTPConnection("127.0.0.1", port, timeout=NEVER)) as client:
        try:
            client.request("GET", "/readyz")
        except ConnectionError:
            return False
        answer = client.getresponse()
        answer.read()
        return answer.status == 200


@pytest.fixture
def port():
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_one_port_answers_for_all_children(worker_process, eventually, port):
    process = worker_process("--processes", "2", "--probe-port", f"127.0.0.1:{port}")
    eventually(lambda: is_ready(port), why=process.output)
    process.send(signal.SIGSTOP)
    process.send(signal.SIGCONT)
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    socket.create_server(("127.0.0.1", port)).close()


def test_a_task_that_keeps_the_gil_does_not_delay_an_answer(worker_process, eventually, port):
    process = worker_process("--threads", "1", "--probe-port", f"127.0.0.1:{port}")
    eventually(lambda: is_ready(port), why=process.output)
    running_tasks.keep_gil.enqueue(running_tasks.FOREVER)
    eventually(lambda: Effect.objects.exists(), why="the task did not begin")
    assert is_ready(port)


def test_a_worker_answers_while_a_child_drains_for_its_replacement(worker_process, eventually, port):
    options = ["--max-tasks", "1", "--grace", "600", "--probe-port", f"127.0.0.1:{port}"]
    process = worker_process(*options)
    running_tasks.ask.enqueue()
    eventually(lambda: Effect.objects.exists(), why="the task did not begin")
    process.wait_for("Replacing")
    eventually(lambda: is_ready(port), why=process.output)
    assert Task.objects.get().status == "RUNNING", "the old one is still there"
    Task.objects.cancel()
    eventually(lambda: Task.objects.filter(status="CANCELLED").exists())
    process.wait_for("has ended")
