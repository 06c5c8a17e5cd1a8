"""Tasks when an asynchronous standby takes over without the last commits: the page about backups has a table of it."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.db import connections

from django_pglock.models import Task
from django_pglock.worker import Worker
from example_project.postgres import PrivatePostgres
from tests.sample import tasks
from tests.servers.test_standby import connect

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
        with connect(servers[1]) as standby:
            eventually(lambda: standby.execute("SELECT to_regclass('django_pglock_task')").fetchone()[0])
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


def test_what_the_standby_had_not_got_is_gone_or_runs_again(servers, cut_off):
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
    connections["old"].close()
    servers[0].halt("immediate")
    with connect(servers[1]) as standby:
        standby.execute("SELECT pg_promote(wait_seconds => 120)")
    assert states("new") == {"done before": ("SUCCESSFUL", 1), "done afterwards": ("READY", 0)}
    enqueue("on the new primary", "new")
    work("new")
    assert set(states("new").values()) == {("SUCCESSFUL", 1)}
    assert len(states("new")) == 3
