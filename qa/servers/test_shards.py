"""Tasks on two servers: one command runs both, and the tasks of a key stay on one, in their order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from example_project.postgres import PrivatePostgres
from tests.conftest import NEVER, ROOT, WorkerProcess, ask
from tests.warm.process import start

pytestmark = pytest.mark.acceptance

BOTH = ("--database", "default", "--database", "south")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers with the tables of a project, whose environment this is from here on."""
    notes = tmp_path_factory.mktemp("shards") / "notes"
    with pytest.MonkeyPatch.context() as patch, PrivatePostgres() as north, PrivatePostgres() as south:
        patch.setenv("DJANGO_SETTINGS_MODULE", "qa.servers.shards")
        patch.setenv("SHARDS_FILE", str(notes))
        patch.setenv("NORTH_URL", north.url)
        patch.setenv("SOUTH_URL", south.url)
        servers = {"default": north, "south": south}
        for name in servers:
            manage("migrate", "django_pglock", "--verbosity", "0", "--database", name)
        yield servers


@pytest.fixture
def project(servers):
    """Return the file of a project without tasks."""
    for server in servers.values():
        ask(server, "TRUNCATE django_pglock_task CASCADE")
    notes = Path(os.environ["SHARDS_FILE"])
    notes.unlink(missing_ok=True)
    return notes


def manage(*arguments):
    run([sys.executable, str(ROOT / "manage.py"), *arguments])


def enqueue(numbers, *backends):
    code = "import django; django.setup(); from tests.sample.shard_tasks import enqueue"
    run([sys.executable, "-c", f"{code}; enqueue({numbers}, backends={backends})"])


def run(command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = start(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate(timeout=NEVER)
    assert process.returncode == 0, output


def customers(server):
    return {number for (number,) in ask(server, "SELECT DISTINCT (args->>0)::int FROM django_pglock_task")}


def numbers_by_customer(notes):
    found = defaultdict(list)
    for line in notes.read_text().splitlines():
        customer, number = map(int, line.split())
        found[customer].append(number)
    return dict(found)


def test_one_command_runs_the_tasks_of_both_servers(project, servers):
    enqueue([1, 2, 3], "default", "south")
    north, south = (customers(server) for server in servers.values())
    assert north | south == set(range(20))
    assert not north & south
    assert min(len(north), len(south)) > 3
    manage("runlockworker", *BOTH, "--drain", "--threads", "2")
    assert numbers_by_customer(project) == {key: [1, 2, 3] for key in range(20)}
    for server in servers.values():
        assert ask(server, "SELECT DISTINCT status FROM django_pglock_task") == [("SUCCESSFUL",)]


def test_a_second_server_is_added_and_the_order_of_each_key_is_kept(project, servers):
    """As docs/worker.md says: the new server is paused until the old one has run what it had."""
    enqueue([1, 2], "default")
    manage("locktasks", "pause", "default", "--database", "south")
    enqueue([3, 4], "default", "south")
    manage("runlockworker", *BOTH, "--drain", "--threads", "2")
    moved = customers(servers["south"])
    found = numbers_by_customer(project)
    assert moved
    assert found == {customer: [1, 2] if customer in moved else [1, 2, 3, 4] for customer in range(20)}
    manage("locktasks", "resume", "default", "--database", "south")
    manage("runlockworker", *BOTH, "--drain", "--threads", "2")
    assert numbers_by_customer(project) == {key: [1, 2, 3, 4] for key in range(20)}


def test_the_loss_of_one_server_does_not_stop_tasks_of_the_other(project, servers, eventually):
    lost = servers["south"]
    process = WorkerProcess(*BOTH, "--threads", "1", url=lost.url, DJANGO_SETTINGS_MODULE="qa.servers.shards")
    try:
        eventually(lambda: process.output.count("is ready") == 2, why=process.output)
        lost.halt()
        enqueue([1], "default")
        eventually(lambda: project.exists() and len(numbers_by_customer(project)) == 20, why=process.output)
    finally:
        process.end()
        if lost._server is None:
            lost.launch()
