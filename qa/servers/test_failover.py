"""Tasks when an asynchronous standby takes over without the last commits: the page about backups has a table of it."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connections

from django_pglock.models import Task
from django_pglock.store.claim import claim_statement, claims_of
from django_pglock.store.outcome import Succeeded
from django_pglock.store.settle import settle
from django_pglock.worker import Worker
from example_project.postgres import PrivatePostgres
from tests.conftest import session_at
from tests.sample import tasks

#: More than the 32 ids that a sequence writes into the WAL in advance.
MANY = 40
MOVE_IDS = """
SELECT setval(name, nextval(name) + 1000000) FROM pg_get_serial_sequence('django_pglock_task', 'id') AS name
"""

pytestmark = pytest.mark.acceptance


@pytest.fixture
def servers(alias, settings):
    with PrivatePostgres() as primary, PrivatePostgres(standby_of=primary) as standby:
        for name, server in (("old", primary), ("new", standby)):
            alias(name, HOST=str(server.folder), PORT="", NAME="postgres", USER="postgres", PASSWORD="")
            settings.TASKS = {
                **settings.TASKS,
                name: {**settings.TASKS["default"], "OPTIONS": {"database": name}},
            }
        call_command("migrate", "django_pglock", database="old", verbosity=0)
        yield primary, standby


@pytest.fixture
def cut_off(servers, eventually):
    """Let the standby get all tasks, and then nothing more."""

    def cut():
        with session_at(servers[0]) as primary, session_at(servers[1]) as standby:
            # The tables are made in several transactions.
            written = primary.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
            eventually(lambda: standby.execute("SELECT pg_last_wal_replay_lsn() >= %s", written).fetchone()[0])
            eventually(lambda: states("new") == states("old"))
            standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
            standby.execute("SELECT pg_reload_conf()")
            eventually(lambda: not standby.execute("SELECT FROM pg_stat_wal_receiver").fetchall())

    return cut


def enqueue(word, alias="old"):
    return int(tasks.echo.using(backend=alias).enqueue(word).id)


def work(alias):
    Worker(using=alias, threads=1, drain=True).run()


def states(alias):
    return {row.args[0]: (row.status, row.attempts) for row in Task.objects.using(alias)}


def fail_over(primary, standby):
    connections["old"].close()
    primary.halt("immediate")
    standby.promote()


def claims(alias):
    worker = uuid4()
    paths = [tasks.echo.module_path]
    rows = claim_statement(alias, worker=worker, paths=paths).execute(MANY, "default")
    return {claim.id: claim for claim in claims_of(rows, worker)}


@pytest.mark.parametrize("is_moved", [False, True], ids=["unless the sequence is moved", "not after it was moved"])
def test_after_a_failover_ids_of_lost_tasks_are_used_again(servers, cut_off, is_moved):
    """The number of attempts is the same, too: an outcome for a lost task ends the task that has its id now."""
    cut_off()
    lost = {enqueue("lost") for _ in range(MANY)}
    claims_of_lost = claims("old")
    fail_over(*servers)
    if is_moved:
        with session_at(servers[1]) as session:
            session.execute(MOVE_IDS)
    new = {enqueue("new", "new") for _ in range(MANY)}
    assert claims("new").keys() == new
    twice = new & lost
    assert bool(twice) is not is_moved
    outcomes = [(claims_of_lost[id_], Succeeded()) for id_ in lost]
    assert settle("new", outcomes, uuid4()).keys() == twice


def test_transactions_that_the_standby_lacked_are_lost_or_run_again(servers, cut_off):
    enqueue("done before")
    work("old")
    enqueue("done afterwards")
    cut_off()
    work("old")
    enqueue("enqueued afterwards")
    assert states("old") == {
        "done before": ("SUCCESSFUL", 1),
        "done afterwards": ("SUCCESSFUL", 1),
        "enqueued afterwards": ("READY", 0),
    }
    fail_over(*servers)
    assert states("new") == {"done before": ("SUCCESSFUL", 1), "done afterwards": ("READY", 0)}
    enqueue("on the new primary", "new")
    work("new")
    assert set(states("new").values()) == {("SUCCESSFUL", 1)}
    assert len(states("new")) == 3
