"""Faults under load, and whether the guarantees hold. Not part of the default run: ``pytest qa/chaos``.

A module whose faults harm the server has a ``server`` fixture of its own, which the experiment then uses.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from example_project.postgres import PrivatePostgres
from qa.chaos.evidence import Recovery
from qa.chaos.experiment import ENVIRONMENT, ChaosWorker, Experiment, Fault
from qa.chaos.report import Row, table, write
from tests.conftest import make_tables

_ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chaos-report", type=Path, metavar="FILE", help="write the table as markdown, between its marks if it has any"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """Write a row also for a fault that was skipped, or that failed before it could show anything."""
    report = yield
    fault = fault_of(item)
    rows = item.config.stash[_ROWS]
    if report.skipped and fault:
        rows.append(Row(fault, call.excinfo.value.msg, None, None, is_kept=None))
    if report.failed and fault and all(row.is_kept for row in rows if row.fault == fault):
        rows.append(Row(fault, f"{report.when} ended with an error", None, None, is_kept=False))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[_ROWS]
    if not rows:
        return
    terminalreporter.section("what was shown")
    terminalreporter.write(table(rows))
    if path := config.getoption("--chaos-report"):
        write(rows, path)


def fault_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("fault")
    return marker.args[0] if marker else ""


@pytest.fixture(scope="session")
def is_short(pytestconfig: pytest.Config) -> bool:
    """Whether this is the short form: faults last for some seconds only."""
    return bool(pytestconfig.option.markexpr == "short")


@pytest.fixture(scope="session")
def shared_server() -> Iterator[PrivatePostgres]:
    """A durable server for all faults that do it no harm."""
    with PrivatePostgres(durable=True) as server:
        make_tables(server, **ENVIRONMENT)
        yield server


@pytest.fixture
def server(shared_server: PrivatePostgres) -> PrivatePostgres:
    """The server under test."""
    return shared_server


@pytest.fixture
def experiment(
    request: pytest.FixtureRequest,
    server: PrivatePostgres,
    is_short: bool,
    django_db_blocker: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Experiment]:
    """The experiment of a test marked with ``fault``. Django's connection of this process leads to its server, too."""
    for name, value in {"HOST": str(server.folder), "NAME": "postgres", "USER": "postgres"}.items():
        monkeypatch.setitem(connection.settings_dict, name, value)
    experiment = Experiment(server, fault_of(request.node), request.config.stash[_ROWS], is_short=is_short)
    with django_db_blocker.unblock():
        connection.close()
        experiment.clear()
        try:
            yield experiment
        finally:
            experiment.close()
            connection.close()


@pytest.fixture
def hit(experiment: Experiment, eventually: Callable[..., Any]) -> Callable[..., Fault]:
    """Send a signal to a worker in the middle of a task, under load, when so many tasks have begun."""

    def hit(victim: ChaosWorker, number: signal.Signals = signal.SIGKILL, *, runs: int = 10) -> Fault:
        begun = experiment.under_load(lambda: experiment.running(runs) and experiment.in_flight(victim.id), seconds=0.5)
        eventually(begun, why="the work did not begin")
        fault = experiment.send_signal(victim, number)
        assert fault.in_flight, "the victim had no task in flight"
        return fault

    return hit


@pytest.fixture
def recovery_after(experiment: Experiment, eventually: Callable[..., Any]) -> Callable[[Fault], Recovery]:
    """Wait until all tasks have ended, and return how soon those of the victim ran elsewhere."""

    def recover(fault: Fault) -> Recovery:
        eventually(experiment.is_over, why="some task is stuck")
        return experiment.judge().recovery(fault.in_flight, fault.victim, fault.at)

    return recover
