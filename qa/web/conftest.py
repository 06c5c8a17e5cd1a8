"""Locked views behind real servers. Not part of the default run: ``pytest qa/web``.

A server is started when its first test comes and serves all tests of its kind. Each test has a lock of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from qa.web.observer import Observer
from qa.web.sites import KINDS, Site
from qa.web.visit import Visit
from tests.pgbouncer import PROGRAM, PgBouncer, way_to_server


@pytest.fixture(scope="session")
def direct() -> str:
    """The DATABASE_URL of the tests' own server."""
    return os.environ["DATABASE_URL"]


@pytest.fixture(scope="session")
def session_pooler(observing: Observer) -> Iterator[str]:
    """That of a PgBouncer before it, with a session for each of its clients."""
    yield from _pooled(observing, mode="session")


@pytest.fixture(scope="session")
def transaction_pooler(observing: Observer) -> Iterator[str]:
    """That of a PgBouncer before it, with a session for each transaction."""
    yield from _pooled(observing, mode="transaction")


def _pooled(observing: Observer, *, mode: str) -> Iterator[str]:
    assert PROGRAM is not None, "no PgBouncer on this machine: apt-get install pgbouncer"
    with PgBouncer({"web": way_to_server(observing.info)}, mode=mode) as pooler:
        yield pooler.url("web")


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
        url: str = request.getfixturevalue(KINDS[name].database)
        sites[name] = Site(name, tmp_path_factory.mktemp(name), url)
        sites[name].start()
    return sites[name]


@pytest.fixture(scope="session")
def observing(direct: str) -> Iterator[Observer]:
    """A session of the tests' own in the database with the locks."""
    observer = Observer(direct)
    yield observer
    observer.close()


@pytest.fixture
def observer(observing: Observer) -> Iterator[Observer]:
    """That session. It holds no lock after the test."""
    yield observing
    observing.free_all()


@pytest.fixture
def visit(site: Site, observer: Observer) -> Iterator[Callable[[], Visit]]:
    """Make a visit with a new lock."""
    visits: list[Visit] = []

    def begin() -> Visit:
        visits.append(Visit(site, observer))
        return visits[-1]

    yield begin
    for visit in visits:
        visit.leave()
    if end := site.end():
        # The next tests have a server again, so that only this test fails.
        site.start()
        pytest.fail(end)
