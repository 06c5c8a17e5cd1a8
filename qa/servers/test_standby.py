"""A primary and a hot standby: locks are taken on the primary, and exclude other sessions only there."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import connections, transaction

from django_pglock import Lease, LockError, LockNotAvailable, lock, try_lock
from django_pglock.models import AdvisoryLock
from django_pglock.models import Lease as LeaseRow
from example_project.postgres import PrivatePostgres
from tests.conftest import session_at

pytestmark = pytest.mark.acceptance


class ReadsFromStandby:
    """What most projects with a standby have."""

    def db_for_read(self, model, **hints):
        return "standby"

    def db_for_write(self, model, **hints):
        return "primary"


@pytest.fixture(scope="module")
def servers():
    with PrivatePostgres() as primary, PrivatePostgres(standby_of=primary) as standby:
        yield {"primary": primary, "standby": standby}


@pytest.fixture
def two(servers, add_database, settings):
    """Both as databases of the project, with reads routed to the standby."""
    for name, server in servers.items():
        add_database(name, server)
    settings.DATABASE_ROUTERS = [ReadsFromStandby()]
    settings.DJANGO_PGLOCK = {"USING": "primary"}


@pytest.fixture
def add_database(alias):
    """Add a server as a database of the project."""

    def add(name, server):
        alias(name, HOST=str(server.folder), PORT="", NAME="postgres", USER="postgres", PASSWORD="")

    return add


def locks_on(name):
    with connections[name].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
        return cursor.fetchone()[0]


def test_locks_are_taken_on_the_database_of_the_setting_and_never_on_the_replica(two):
    with lock("a"):
        assert (locks_on("primary"), locks_on("standby")) == (1, 0)
    with transaction.atomic(using="primary"), lock("a", timeout=1):
        assert (locks_on("primary"), locks_on("standby")) == (1, 0)
    with lock("a", scope="transaction"):
        assert (locks_on("primary"), locks_on("standby")) == (1, 0)


def test_locks_are_shown_where_they_are_taken(two):
    """The standby has its own lock table, which would show all locks as free."""
    assert AdvisoryLock.objects.for_name("a").db == "primary"
    assert AdvisoryLock.objects.using("standby").for_name("a").db == "standby"


@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_a_lock_on_the_standby_excludes_no_other(two, scope):
    """PostgreSQL grants both locks. Only the system check keeps a wrong alias from making two holders."""
    with lock("a", scope=scope), try_lock("a", scope=scope, using="standby") as held:
        assert held


@pytest.mark.parametrize(("used", "expected"), [("standby", ["django_pglock.W004"]), ("primary", [])])
def test_the_check_warns_of_a_standby_only(two, settings, used, expected):
    settings.DJANGO_PGLOCK = {"USING": used}
    problems = run_checks(databases=["primary", "standby"])
    # W012 is about the pages of the admin, which show another database here.
    warnings = {problem.id for problem in problems if problem.id.startswith("django_pglock.W")}
    assert warnings - {"django_pglock.W012"} == {*expected}


def test_a_failover_ends_advisory_locks_and_no_lease(add_database, eventually):
    """The new primary has no locks of the old one, but all its leases."""
    with PrivatePostgres() as primary, PrivatePostgres(standby_of=primary) as standby:
        add_database("old", primary)
        with connections["old"].schema_editor() as editor:
            editor.create_model(LeaseRow)
        taken = Lease("a", ttl=60, using="old")
        with pytest.raises(LockError, match=r"released .* expires within"), lock("a", using="old"), taken as lease:
            with session_at(standby) as session:
                eventually(lambda: session.execute("SELECT to_regclass('django_pglock_lease')").fetchone()[0])
                eventually(lambda: session.execute("SELECT count(*) FROM django_pglock_lease").fetchone()[0])
            primary.halt("immediate")
            with session_at(standby) as session:
                session.execute("SELECT pg_promote()")
            add_database("new", standby)
            with pytest.raises(LockNotAvailable), Lease("a", using="new"):
                pass
            with try_lock("a", using="new") as held:
                assert held
            LeaseRow.objects.using("new").all().free()
            with Lease("a", using="new") as next_one:
                assert next_one.token == lease.token + 1


def test_the_self_test_refuses_a_standby(two):
    with pytest.raises(CommandError, match="do not exclude"):
        call_command("locks", "--selftest", database="standby", stdout=StringIO())
