"""A pytest plugin that measures which branches ``tests/unit`` and ``tests/db`` take: ``-p tests.branches``.

It measures in the process of the tests only, and in no other folder: tests there start processes, and interrupt
threads by an exception that could strike inside of coverage, which would then keep its lock for ever. A test with
parameters is measured with one set of them, because measuring takes two thirds as long as the test itself. ``tox -e
coverage`` measures all, and worker processes, too. Each process of tests writes a data file beside ``COVERAGE_FILE``.
"""

from __future__ import annotations

from collections.abc import Generator

import coverage
import pytest

MEASURED = ("tests/unit/", "tests/db/")
#: It interrupts threads, too.
EXCEPT = "tests/db/worker/running/test_timeout.py"

# The package is imported while tests are collected, so this begins before.
measurement = coverage.Coverage(config_file="pyproject.toml")
measurement.set_option("run:patch", [])
# The process that hands the tests to others runs none.
measurement.set_option("run:disable_warnings", ["no-data-collected"])
measurement.start()
is_running = True
#: The functions of which a test was measured.
measured: set[str] = set()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global is_running
    function = item.nodeid.partition("[")[0]
    is_wanted = function.startswith(MEASURED) and not function.startswith(EXCEPT) and function not in measured
    measured.add(function)
    if is_wanted and not is_running:
        measurement.start()
    elif is_running and not is_wanted:
        measurement.stop()
    is_running = is_wanted
    return (yield)


def pytest_unconfigure() -> None:
    if is_running:
        measurement.stop()
    measurement.save()
