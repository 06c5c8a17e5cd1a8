"""What the tests of all systems use."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from example_project.demo.processes import Fleet
from example_project.systems.stage import call
from example_project.systems.web import Site


@pytest.fixture
def fleet(transactional_db: None) -> Iterator[Fleet]:
    """Start programs on the tests' database. All of them are stopped at the end."""
    fleet = Fleet(_environment())
    yield fleet
    fleet.stop()


@pytest.fixture
def process(fleet: Fleet) -> Callable[..., subprocess.Popen[bytes]]:
    """Call a module's function in a process of its own, with arguments that JSON can hold."""

    def start(function: Callable[..., object], *arguments: Any, **environment: str) -> subprocess.Popen[bytes]:
        return call(fleet, function, *arguments, **environment)

    return start


@pytest.fixture(scope="module")
def site(django_db_setup: None) -> Iterator[Site]:
    """The example project behind real web servers, and a payment provider, for all tests of a module."""
    fleet = Fleet(_environment())
    try:
        yield Site(fleet)
    finally:
        fleet.stop()


def _environment() -> dict[str, str]:
    server = os.environ["DATABASE_URL"].rpartition("/")[0]
    return {
        "DATABASE_URL": f"{server}/{connection.settings_dict['NAME']}",
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "HEARTBEAT_INTERVAL": "0.5",
        "HEARTBEAT_LIMIT": "4",
    }
