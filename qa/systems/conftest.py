"""Fixtures for the tests of all systems."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest

from example_project.demo.processes import Fleet
from example_project.demo.screen import Screen
from example_project.systems.harness import Harness, call
from example_project.systems.web import Site
from tests.conftest import environment_at
from tests.warm.process import start


class WarmFleet(Fleet):
    """Its processes are forked by a warm parent."""

    open = staticmethod(start)


@pytest.fixture
def environment(transactional_db: None) -> dict[str, str]:
    """The environment of programs on the tests' database: that of all processes of tests, with one warm parent."""
    return environment_at()


@pytest.fixture
def fleet(environment: dict[str, str]) -> Iterator[Fleet]:
    """Start programs on the tests' database. All of them are stopped at the end."""
    fleet = WarmFleet(environment)
    yield fleet
    fleet.stop()


class RecordingHarness(Harness):
    """A harness that keeps what a scenario says, and judges what it claims."""

    def __init__(self, fleet: Fleet) -> None:
        self.out = StringIO()
        super().__init__(Screen(self.out), fleet)

    def judge(self) -> str:
        """Fail if a claim does not hold, or there are none. Return what the scenario has said."""
        told = self.out.getvalue()
        assert self.holds, [*(finding for finding in self.findings if not finding.holds), told, self.fleet.output()]
        return told


@pytest.fixture
def harness(fleet: Fleet) -> RecordingHarness:
    """A scenario of a system runs here as in its command, with processes that are forked by a warm parent."""
    return RecordingHarness(fleet)


@pytest.fixture
def process(fleet: Fleet) -> Callable[..., subprocess.Popen[bytes]]:
    """Call a module's function in a process of its own, with arguments that JSON can hold."""

    def start(function: Callable[..., object], *arguments: Any, **environment: str) -> subprocess.Popen[bytes]:
        return call(fleet, function, *arguments, **environment)

    return start


@pytest.fixture(scope="module")
def site(django_db_setup: None) -> Iterator[Site]:
    """The example project behind real web servers, and a payment provider, for all tests of a module."""
    fleet = WarmFleet(environment_at())
    try:
        yield Site(fleet)
    finally:
        fleet.stop()
