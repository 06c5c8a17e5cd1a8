"""A handler, a filter or a formatter that raises: the code that logs continues."""

from __future__ import annotations

import ast
import logging
import pkgutil
import threading
from importlib import import_module
from pathlib import Path

import pytest

import django_pglock
from django_pglock import loggers
from tests.conftest import NEVER

PACKAGE = Path(django_pglock.__file__).parent
#: Modules that need packages that are not installed here, or that run when they are imported.
NOT_IMPORTED = ("contrib", "migrations", "pytest_plugin")


@pytest.fixture(autouse=True)
def reports(monkeypatch):
    """Report each failure, and not one a minute."""
    monkeypatch.setattr(loggers, "reports", loggers.RateOfRecords(0.0))


@pytest.fixture
def logger():
    logger = loggers.get_logger("django_pglock.worker")
    before = logger.handlers[:], logger.filters[:]
    yield logger
    logger.handlers, logger.filters = before


class Raising(logging.Handler):
    """Raises what it is given, in the handler itself, in its filter or in its formatter."""

    def __init__(self, error: BaseException, where: str) -> None:
        super().__init__()
        self.error = error
        self.count = 0
        setattr(self, where, self.fail)

    def fail(self, *args):
        self.count += 1
        raise self.error

    def emit(self, record):
        self.format(record)


def names():
    """The names of the package's loggers. They are made when their modules are imported."""
    for module in pkgutil.walk_packages([str(PACKAGE)], "django_pglock."):
        if not set(module.name.split(".")) & set(NOT_IMPORTED):
            import_module(module.name)
    return sorted(name for name in logging.root.manager.loggerDict if name.startswith("django_pglock."))


def test_each_module_of_the_package_gets_its_logger_from_get_logger():
    """Of another logger, a call may raise."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "getLogger" and node.args:
                called = ast.unparse(node.args[0])
                if "django_pglock" in called or "__name__" in called:
                    found.append((str(path.relative_to(PACKAGE)), called))
    # The handler of runlockworker is added to the logger above all of the others, to which nothing is logged.
    assert found == [("management/worker_process.py", "'django_pglock'")]


def test_a_call_of_no_logger_of_the_package_raises_what_a_handler_raises(capsys):
    assert len(names()) >= 5
    for name in names():
        logger, handler = logging.getLogger(name), Raising(OSError("the disk is full"), "emit")
        logger.addHandler(handler)
        try:
            if isinstance(logger, logging.Logger) and vars(logger).get("handle"):
                logger.error("a line of %s", name)
                assert handler.count == 1, name
                assert f"a line of %s'\nArguments: ('{name}',)" in capsys.readouterr().err
        finally:
            logger.removeHandler(handler)


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit("leave")])
@pytest.mark.parametrize("where", ["emit", "handle", "filter", "format"])
def test_no_exception_of_the_log_leaves_a_call_in_a_thread(logger, in_threads, capsys, where, error):
    """Before, a handler that called sys.exit() ended the settler, and so the process of its tasks."""
    logger.addHandler(handler := Raising(error, where))
    assert in_threads(lambda number: logger.error("line %d", number) or "went on", 1) == ["went on"]
    assert handler.count == 1
    printed = capsys.readouterr().err
    assert "--- Logging error ---" in printed
    assert "in fail\n    raise self.error" in printed
    assert "Message: 'line %d'\nArguments: (0,)" in printed


def test_a_handler_may_end_the_process_in_its_main_thread(logger):
    logger.addHandler(Raising(SystemExit("leave"), "emit"))
    with pytest.raises(SystemExit, match="leave"):
        logger.error("a line")


def test_a_thread_whose_records_another_one_writes_waits_for_no_handler(logger, monkeypatch):
    """All others write their own. At the end, Python must not wait for the handler either."""
    monkeypatch.setattr(loggers, "LAST_RECORDS", 0.01)
    kept = []
    monkeypatch.setattr(loggers.atexit, "unregister", kept.append)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: written.append(record.getMessage())
    written, go_on = [], threading.Event()
    with handler.lock:
        holder = threading.Thread(target=lambda: logger.error("of another thread") or go_on.set())
        with loggers.written_by_thread(only_mine=True):
            logger.error("mine")
            holder.start()
            assert not go_on.wait(0.05)
    assert kept == [logging.shutdown]
    assert go_on.wait(NEVER)
    assert "of another thread" in written


@pytest.mark.parametrize("stream", ["closed", None])
def test_there_may_be_no_stream_for_the_report(logger, monkeypatch, tmp_path, stream):
    if stream == "closed":
        stream = (tmp_path / "log").open("w")
        stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    logger.addHandler(handler := Raising(ValueError("broken"), "emit"))
    logger.error("a line")
    assert handler.count == 1


def test_a_record_that_repeats_is_allowed_once_in_its_time(monkeypatch):
    clock = iter([100.0, 101.0, 159.9, 160.0, 161.0])
    monkeypatch.setattr(loggers.time, "monotonic", lambda: next(clock))
    rate = loggers.RateOfRecords(60.0)
    assert [rate.allows() for _ in range(5)] == [True, False, False, True, False]
