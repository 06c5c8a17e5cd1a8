"""Keys between processes: two that enqueue for the same keys at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from django.db import connection

from django_pglock.models import Task
from tests.conftest import ROOT
from tests.warm.process import start

pytestmark = [pytest.mark.acceptance, pytest.mark.django_db(transaction=True)]

# Reads programs, each as one line of JSON. Prints that it has one, waits for a line, runs it, and prints the result.
PROCESS = """
import json
import sys
import django
django.setup()
from django.db import connection, transaction
from django_pglock import Unique, enqueue_many
from django_pglock.models import Task
from example_project.systems.harness import count
from tests.sample import keyed_tasks as keyed
connection.ensure_connection()
while line := sys.stdin.readline():
    print("there", flush=True)
    sys.stdin.readline()
    try:
        exec(json.loads(line))
        print("done", flush=True)
    except Exception as error:
        print(type(error.__cause__ or error).__name__, flush=True)
"""


@pytest.fixture(scope="module")
def processes(django_db_setup):
    """Two processes, for all tests of this file."""
    server, _, _ = os.environ["DATABASE_URL"].rpartition("/")
    environment = {
        **os.environ,
        "DATABASE_URL": f"{server}/{connection.settings_dict['NAME']}",
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
    }
    command = [sys.executable, "-c", PROCESS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [start(command, env=environment, **pipes) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def at_once(processes):
    """Run a text in each of the processes, both at once; return what each says in the end.

    ``meanwhile`` is called when both have begun.
    """

    def tell(*lines):
        for process, line in zip(processes, lines, strict=True):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()

    def run(*texts, meanwhile=lambda: None):
        tell(*map(json.dumps, texts))
        assert [process.stdout.readline() for process in processes] == ["there\n", "there\n"]
        tell("", "")
        meanwhile()
        return [process.stdout.readline().strip() for process in processes]

    return run


ONE_BY_ONE = """
for number in range(200):
    keyed.step.enqueue(number)
"""
IN_TRANSACTIONS = """
for number in range(200):
    with transaction.atomic():
        keyed.step.enqueue(number)
"""
MANY = """
enqueue_many(keyed.step, [{"order_id": number} for number in range(200)])
"""


@pytest.mark.parametrize(
    "texts",
    [(ONE_BY_ONE, ONE_BY_ONE), (IN_TRANSACTIONS, IN_TRANSACTIONS), (ONE_BY_ONE, IN_TRANSACTIONS), (ONE_BY_ONE, MANY)],
    ids=["one by one", "in transactions", "both", "many"],
)
def test_two_processes_that_enqueue_at_once_admit_one_task_of_each_key(at_once, texts):
    """Without the lock on the key, each process reads the key before it can see the row of the other one."""
    assert at_once(*texts) == ["done", "done"]
    by_key = {}
    for key, status in Task.objects.values_list("lock_key", "status"):
        by_key.setdefault(key, []).append(status)
    assert len(by_key) == 200
    assert {tuple(sorted(each)) for each in by_key.values()} == {("BLOCKED", "READY")}


#: Twelve thousand are several statements of each call.
SORTED = """
enqueue_many(keyed.refresh, [{"number": number} for number in range(12_000)])
"""
REVERSED = """
enqueue_many(keyed.refresh, [{"number": number} for number in reversed(range(12_000))])
"""


def test_many_unique_calls_by_two_processes_in_opposite_orders(at_once):
    """Each process waits for keys that the other one has. Only a common order of the keys prevents a deadlock."""
    assert at_once(SORTED, REVERSED) == ["done", "done"]
    assert Task.objects.count() == 12_000
