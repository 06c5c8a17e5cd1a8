"""Probes of the processes of a supervisor."""

from __future__ import annotations

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
    """A free port that has a free one behind it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
        return port


def test_each_process_answers_at_a_port_of_its_own(worker_process, eventually, port):
    process = worker_process("--processes", "2", "--probe-port", f"127.0.0.1:{port}")
    eventually(lambda: is_ready(port) and is_ready(port + 1), why=process.output)


def test_a_replacement_answers_while_the_old_process_drains(worker_process, eventually, port):
    options = ["--max-tasks", "1", "--grace", "600", "--probe-port", f"127.0.0.1:{port}"]
    process = worker_process(*options)
    running_tasks.ask.enqueue()
    eventually(lambda: Effect.objects.exists(), why="the task did not begin")
    process.wait_for("Replacing")
    eventually(lambda: is_ready(port), why=process.output)
    assert Task.objects.get().status == "RUNNING", "the old one is still there"
    assert "cannot be answered" not in process.output
    Task.objects.cancel()
    eventually(lambda: Task.objects.filter(status="CANCELLED").exists())
    process.wait_for("has ended")
