"""The parts of an exception that are kept after an attempt. Nothing else of it is kept."""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import replace

import pytest

from django_pglock.store.outcome import Failure, Snoozed

#: A module of the worker that calls a function.
WORKER = {"__name__": "django_pglock.worker.child.run"}
exec("def run(function):\n    function()", WORKER)


class Connection:
    """An object that a frame refers to."""


def raised_by(function):
    """Return the exception of a function that the worker has called."""
    try:
        WORKER["run"](function)
    except BaseException as error:
        # This frame is above the worker's, as none is in a process of a worker.
        return error.with_traceback(error.__traceback__.tb_next)
    raise AssertionError("nothing was raised")


def fail():
    raise KeyError("order")


def test_a_failure_has_exception_message_and_traceback():
    error = raised_by(fail)
    failure = Failure.of(error)
    assert (failure.exception_path, failure.message) == ("builtins.KeyError", "KeyError: 'order'")
    assert failure.traceback.endswith("KeyError: 'order'\n")
    assert failure.exception is error
    assert failure == replace(failure, exception=None), "the exception itself is not compared"
    assert "exception=" not in repr(failure)
    assert Snoozed(1.0).snoozes == 0
    assert failure.place == f"{__name__}:fail"


def test_frames_of_the_worker_are_left_out():
    """Otherwise each traceback would begin with frames of the worker."""
    lines = Failure.of(raised_by(fail)).traceback.splitlines()
    assert [line.rpartition(", ")[2] for line in lines if line.startswith('  File "')] == ["in fail"]


def caused():
    held = Connection()
    references.append(weakref.ref(held))
    try:
        raise ValueError("first")
    except ValueError as error:
        raise KeyError("second") from error


def fail_with_a_connection():
    held = Connection()
    references.append(weakref.ref(held))
    raise ValueError("first")


def caused_inside():
    try:
        fail_with_a_connection()
    except ValueError as error:
        raise KeyError("second") from error


def in_its_context():
    held = Connection()
    references.append(weakref.ref(held))
    try:
        fail()
    except KeyError:
        raise ValueError("second")  # noqa: B904 - the context is what is tested


def in_a_group():
    try:
        fail_with_a_connection()
    except ValueError as error:
        group = ExceptionGroup("a KeyError", [error])  # noqa: F821
    raise group


#: Python 3.10 has no groups.
GROUPS = [in_a_group] if sys.version_info >= (3, 11) else []
references = []


@pytest.mark.parametrize("function", [caused, caused_inside, in_its_context, *GROUPS])
def test_the_variables_of_all_linked_exceptions_are_released(function):
    """The next task may begin now. It may need a connection or a lock that a variable still refers to."""
    references.clear()
    failure = Failure.of(raised_by(function))
    gc.collect()
    assert [each() for each in references] == [None]
    assert "KeyError" in failure.traceback
    assert "ValueError" in failure.traceback


def test_exceptions_that_refer_to_each_other_have_an_end():
    error = raised_by(fail)
    error.__context__ = other = ValueError("other")
    other.__context__ = error
    assert Failure.of(error).message == "KeyError: 'order'"
