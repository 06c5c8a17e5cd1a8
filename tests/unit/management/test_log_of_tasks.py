"""Log records of tasks are made only if a handler takes them."""

from __future__ import annotations

import io
import logging

import pytest

from django_pglock.management import worker_process as logs


class Below:
    """A filter that refuses all records, as Django's require_debug_true in production."""

    def filter(self, record):
        return False


@pytest.fixture
def tree(monkeypatch):
    """A logger like django.tasks, below one like django, that does not reach pytest's handlers."""
    monkeypatch.setattr(logs, "OF_DJANGO_TASKS", ("house.tasks",))
    house, tasks = logging.getLogger("house"), logging.getLogger("house.tasks")
    house.setLevel(logging.INFO)
    house.propagate = False
    yield house, tasks
    for logger in (house, tasks):
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)


def handler(level=logging.NOTSET, *filters):
    made = logging.Handler(level)
    made.emit = lambda record: None
    for each in filters:
        made.addFilter(each)
    return made


@pytest.mark.parametrize(
    ("handlers", "is_silenced"),
    [
        ([], True),
        ([handler(logging.NOTSET, Below())], True),
        ([handler(logging.ERROR)], True),
        ([handler(logging.INFO)], False),
        ([handler(logging.ERROR), handler()], False),
    ],
)
def test_loggers_without_a_handler_are_silenced(tree, handlers, is_silenced):
    house, tasks = tree
    house.handlers = handlers  # pytest has put its own there
    assert logs.silence_unhandled_loggers() == (["house.tasks"] if is_silenced else [])
    assert tasks.isEnabledFor(logging.INFO) == (not is_silenced)
    assert tasks.isEnabledFor(logging.WARNING)


def test_a_configured_log_level_is_not_changed(tree):
    _, tasks = tree
    tasks.setLevel(logging.DEBUG)
    assert logs.silence_unhandled_loggers() == []
    assert tasks.level == logging.DEBUG


def test_loggers_are_not_silenced_if_another_package_collects_records(tree, monkeypatch):
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda self, record: None)
    assert logs.silence_unhandled_loggers() == []


def test_a_filter_that_raises_may_let_records_pass(tree):
    """The worker starts all the same."""

    class Broken:
        def filter(self, record):
            raise LookupError("no request here")

    house, _ = tree
    house.handlers = [handler(logging.NOTSET, Broken())]
    assert logs.silence_unhandled_loggers() == []


def test_the_handler_of_pytest_receives_records():
    assert logs.is_handled("django.tasks", logging.WARNING)


def test_records_of_django_tasks_reach_every_handler_but_the_terminal(tree, monkeypatch):
    house, tasks = tree
    terminal, mail = logging.StreamHandler(written := io.StringIO()), handler(logging.ERROR)
    mailed = []
    mail.emit = mailed.append
    house.handlers = [terminal, mail]
    logs.keep_off_terminal()
    tasks.error("a task has failed")
    house.error("something else")
    assert written.getvalue() == "something else\n"
    assert [record.getMessage() for record in mailed] == ["a task has failed", "something else"]
    assert logs.silence_unhandled_loggers() == ["house.tasks"], "no handler takes what is below ERROR"


def test_the_last_resort_handler_of_python_does_not_write_to_the_terminal(tree, capsys):
    house, tasks = tree
    house.handlers = []
    logs.keep_off_terminal()
    tasks.error("a task has failed")
    assert capsys.readouterr().err == ""
    assert logs.silence_unhandled_loggers() == ["house.tasks"]
