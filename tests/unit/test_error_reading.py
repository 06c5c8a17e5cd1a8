"""The text of an exception can always be read."""

from __future__ import annotations

import gc
import importlib.util
import sys
import traceback
import weakref
from dataclasses import replace

import pytest

from django_pglock import error_reading
from django_pglock.error_reading import LONGEST_MESSAGE, fingerprint_of, message_in, place_in
from django_pglock.store.outcome import Failure, Snoozed
from tests.sample import throwing_tasks


def test_a_message_that_cannot_be_read_is_named():
    assert error_reading.one_line(ValueError("two\n lines ")) == "two lines"
    assert error_reading.one_line(throwing_tasks.NoText()) == "its message cannot be read (RuntimeError)"


def test_a_traceback_that_python_cannot_print_is_the_class_with_the_message(monkeypatch):
    def fail(error):
        raise RecursionError

    assert "NoText" in error_reading.traceback_of(throwing_tasks.NoText())
    monkeypatch.setattr(traceback, "format_exception", fail)
    assert error_reading.traceback_of(ValueError("seven")) == "builtins.ValueError: seven\n"


def test_an_exception_without_a_cause_follows_the_one_that_was_handled():
    first, second, third = ValueError(), KeyError(), OSError()
    second.__context__ = first
    assert error_reading.following(second) is first
    second.__cause__ = third
    assert error_reading.following(second) is third


TRACE = """Traceback (most recent call last):
  File "/srv/shop/tasks.py", line 12, in charge
    bank.pay(order)
  File "/srv/shop/bank.py", line 88, in pay
    post(url)
  File "/srv/venv/lib/python3.12/site-packages/requests/api.py", line 115, in post
    raise ConnectionError("refused: try later")
requests.exceptions.ConnectionError: refused: try later
"""


#: As Python 3.11 and newer write it. The frames of the exceptions inside of the group have another place.
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/srv/shop/tasks.py", line 12, in charge_all
  |     async with TaskGroup() as group:
  |   File "/usr/lib/python3.12/asyncio/taskgroups.py", line 145, in __aexit__
  |     raise me from None
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/srv/shop/bank.py", line 88, in pay
    |     post(url)
    | ExceptionGroup: refused
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("trace", "place"),
    [
        (TRACE, "bank.py:88"),
        (GROUP, "tasks.py:12"),
        (TRACE.replace("/srv/shop", "/srv/venv/lib/python3.12/site-packages/shop"), "api.py:115"),
        ("no traceback", ""),
        ("", ""),
    ],
)
def test_the_place_is_the_last_own_frame(trace, place):
    assert place_in(trace) == place


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("requests.exceptions.ConnectionError", "refused: try later"),
        ("ConnectionError", "refused: try later"),
        ("builtins.ValueError", ""),
        ("", ""),
    ],
)
def test_the_message_stands_behind_the_exception(exception, message):
    assert message_in(TRACE, exception) == message


def test_the_message_of_a_group_is_its_own():
    expected = "unhandled errors in a TaskGroup (1 sub-exception)"
    assert message_in(GROUP, "builtins.ExceptionGroup") == expected


def test_a_message_is_shown_up_to_its_five_hundredth_character():
    assert LONGEST_MESSAGE == 500
    assert message_in(f"ValueError: {'x' * 499}yz", "ValueError") == "x" * 499 + "y"


BANK = """
def charge(amount):
    if amount < 0:
        raise ValueError(f"{amount} is too small")
    refuse(amount)

def refuse(amount):
    raise ValueError(f"{amount} is too large")
"""


@pytest.fixture
def released(tmp_path, monkeypatch):
    """Write a release of the module into a directory of its own, and load it from there."""

    def release(directory, source):
        path = tmp_path / directory / "bank.py"
        path.parent.mkdir(parents=True)
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("bank", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "bank", module)
        spec.loader.exec_module(module)
        return module

    return release


def failure_of(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return Failure.of(error)
    pytest.fail("it did not fail")


def number_of(failure, task_path="bank.charge"):
    return fingerprint_of(task_path, failure.exception_path, failure.place)


def test_a_fingerprint_is_positive_and_fits_into_a_bigint():
    numbers = [fingerprint_of("bank.charge", f"bank.Error{number}") for number in range(100)]
    assert all(0 <= number < 2**63 for number in numbers)
    assert len(set(numbers)) == 100


def test_fingerprints_are_the_same_in_every_release():
    """It is stored with failed tasks."""
    assert fingerprint_of("bank.charge", "builtins.ValueError", "bank:refuse") == 1275375432507598721


def test_a_text_with_surrogates_has_a_fingerprint():
    assert fingerprint_of("a\udcff", "b") != fingerprint_of("a", "b")


def test_a_fingerprint_depends_on_function_exception_and_place_and_not_on_the_message(released):
    bank = released("a", BANK)
    small, large, larger = (failure_of(bank.charge, amount) for amount in (-1, 1, 2))
    assert (small.place, large.place) == ("bank:charge", "bank:refuse")
    assert number_of(large) == number_of(larger) != number_of(small)
    assert number_of(large) != number_of(large, "bank.refund")
    assert number_of(large) != fingerprint_of("bank.charge", "builtins.TypeError", large.place)


def test_a_fingerprint_does_not_depend_on_folder_and_line_numbers(released):
    before = failure_of(released("releases/1", BANK).charge, 1)
    after = failure_of(released("releases/2", "import os\n\n\n" + BANK).charge, 1)
    assert before.traceback != after.traceback
    assert number_of(before) == number_of(after)


def test_frames_of_libraries_are_passed_over(released):
    library = released("lib/python3/site-packages", "def send():\n    raise OSError('down')\n")
    own = released("shop", "def charge(send):\n    send()\n")
    assert failure_of(own.charge, library.send).place == "bank:charge"
    assert failure_of(library.send).place == "tests.unit.test_error_reading:failure_of", "this file is own, too"


def test_without_own_frames_the_last_frame_is_the_place(released):
    library = released("site-packages", "def outer():\n    inner()\n\ndef inner():\n    raise OSError\n")
    error = failure_of(library.outer).exception
    assert Failure.of(error.with_traceback(error.__traceback__.tb_next)).place == "bank:inner"


def test_without_a_traceback_there_is_no_place():
    assert Failure.of(ValueError()).place == ""


# The parts of an exception that are kept after an attempt. Nothing else of it is kept.


#: A module of the worker that calls a function.
WORKER = {"__name__": "django_pglock.worker.child.attempt"}


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
    failure.clear_frames()
    gc.collect()
    assert [each() for each in references] == [None]
    assert "KeyError" in failure.traceback
    assert "ValueError" in failure.traceback


def test_exceptions_that_refer_to_each_other_have_an_end():
    error = raised_by(fail)
    error.__context__ = other = ValueError("other")
    other.__context__ = error
    assert Failure.of(error).message == "KeyError: 'order'"
