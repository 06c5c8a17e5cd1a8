"""Probes of a worker with several children."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress

import pytest

from django_pglock.models import Task
from example_project.demo.processes import free_port
from qa.processes import readiness
from tests.sample import running_tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.acceptance


@pytest.fixture
def port():
    return free_port()


def is_ready(port):
    with suppress(ConnectionError):
        return readiness(port)[0] == 200


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
