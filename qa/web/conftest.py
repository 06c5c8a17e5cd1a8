"""Locked views behind real servers. Not part of the default run: ``pytest qa/web``.

A server is started when its first test comes and serves all tests of its kind. Each test has a lock of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

from example_project.postgres import PrivatePostgres
from qa.web.observer import Observer
from qa.web.sites import KINDS, Databases, Site
from qa.web.visit import Visit
from tests.pgbouncer import PROGRAM, PgBouncer, way_to_server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--web-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="longest that a lock may stay",
    )


@pytest.fixture(scope="session")
def direct() -> Databases:
    """The tests' own server."""
    return Databases({"DATABASE_URL": os.environ["DATABASE_URL"]}, locks_at=os.environ["DATABASE_URL"])


@pytest.fixture(scope="session")
def session_pooler(direct: Databases) -> Iterator[Databases]:
    """PgBouncer before that server, with a session for each of its clients."""
    yield from _pooled(direct, mode="session")


@pytest.fixture(scope="session")
def transaction_pooler(direct: Databases) -> Iterator[Databases]:
    """PgBouncer before that server, with a session for each transaction."""
    yield from _pooled(direct, mode="transaction")


def _pooled(direct: Databases, *, mode: str) -> Iterator[Databases]:
    assert PROGRAM is not None, "no PgBouncer on this machine: apt-get install pgbouncer"
    with observing(direct) as observer, PgBouncer({"web": way_to_server(observer.info)}, mode=mode) as pooler:
        yield Databases({"DATABASE_URL": pooler.url("web")}, locks_at=direct.locks_at)


@pytest.fixture(scope="session")
def standby() -> Iterator[Databases]:
    """A primary with its hot standby, which is the default database."""
    with PrivatePostgres() as primary, PrivatePostgres(standby_of=primary) as standby:
        yield Databases({"DATABASE_URL": standby.url, "WEB_PRIMARY_URL": primary.url}, locks_at=primary.url)


@contextlib.contextmanager
def observing(databases: Databases) -> Iterator[Observer]:
    observer = Observer(databases.locks_at)
    try:
        yield observer
    finally:
        observer.close()


@pytest.fixture(scope="session")
def sites() -> Iterator[dict[str, Site]]:
    """The servers that run by now. They all end with the session."""
    running: dict[str, Site] = {}
    yield running
    for site in running.values():
        site.stop()


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest, sites: dict[str, Site], tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The server of the kind that a test is parametrized with."""
    name = request.param
    if name not in sites:
        databases: Databases = request.getfixturevalue(KINDS[name].database)
        sites[name] = Site(name, tmp_path_factory.mktemp(name), databases)
        sites[name].start()
    return sites[name]


@pytest.fixture(scope="session")
def observers() -> Iterator[dict[str, Observer]]:
    """Sessions of the tests' own, by the databases in which they are."""
    with contextlib.ExitStack() as stack:
        yield _Observers(stack)


class _Observers(dict[str, Observer]):
    def __init__(self, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, url: str) -> Observer:
        self[url] = observer = Observer(url)
        self._stack.callback(observer.close)
        return observer


@pytest.fixture
def observer(site: Site, observers: dict[str, Observer]) -> Iterator[Observer]:
    """A session of the test in the database with the locks of the server. It holds no lock after the test."""
    observer = observers[site.databases.locks_at]
    yield observer
    observer.free_all()


@pytest.fixture
def visit(site: Site, observer: Observer, pytestconfig: pytest.Config) -> Iterator[Callable[[], Visit]]:
    """Make a visit with a new lock."""
    visits: list[Visit] = []

    def begin() -> Visit:
        visits.append(Visit(site, observer, pytestconfig.getoption("--web-timeout")))
        return visits[-1]

    yield begin
    for visit in visits:
        visit.leave()
    if end := site.end():
        # The next tests have a server again, so that only this test fails.
        site.start()
        pytest.fail(end)
