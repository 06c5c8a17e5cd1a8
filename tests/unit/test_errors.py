"""Every exception can be pickled and copied."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta

import pytest

from django_pglock import errors
from django_pglock.errors import DuplicateTask, LockError, LockNotAvailable, PGLockError
from django_pglock.tasks import Cancel, Retry, Snooze

ATTRIBUTES = {
    "LockNotAvailable": {
        "name": "order:5",
        "key": -5,
        "timeout": 0.5,
        "keys": [-5, 6],
        "names": ["order:5", "#6"],
        "using": "other",
    },
    "DuplicateTask": {"result_id": "17"},
    "StepFailed": {"path": "builtins.ValueError", "message": "no"},
}
CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, PGLockError)]
WAYS = {
    "copied": copy.copy,
    "deep-copied": copy.deepcopy,
    **{
        f"pickled by protocol {number}": lambda error, number=number: pickle.loads(pickle.dumps(error, number))
        for number in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


def make(kind):
    attributes = ATTRIBUTES.get(kind.__name__, {"name": "order:5", "key": -5} if issubclass(kind, LockError) else {})
    error = kind("Something is busy.", **attributes)
    error.seen_by = ["a handler"]
    return error


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_can_be_pickled_and_copied(kind, way):
    """A process pool pickles exceptions of functions. One that cannot be unpickled ends the pool, or hangs it."""
    error = make(kind)
    got = way(error)
    assert type(got) is kind
    assert got is not error
    assert (str(got), got.args, vars(got)) == (str(error), error.args, vars(error))


def test_a_deep_copy_of_an_error_shares_no_list():
    error = make(LockNotAvailable)
    copied = copy.deepcopy(error)
    copied.keys.append(7)
    copied.seen_by.clear()
    assert (error.keys, error.seen_by) == ([-5, 6], ["a handler"])


class Refused(DuplicateTask):
    """A project's own subclass, with other arguments."""

    def __init__(self, order):
        super().__init__(f"Order {order} is on its way.", result_id="17")
        self.order = order


def test_an_error_subclass_with_other_arguments_can_be_pickled():
    got = pickle.loads(pickle.dumps(Refused(5)))
    assert (type(got), str(got), got.order, got.result_id) == (Refused, "Order 5 is on its way.", 5, "17")


def test_a_pickled_error_keeps_its_notes_and_not_its_cause():
    """A cause may be anything, such as a database error with its connection. The notes are text."""
    try:
        raise make(LockNotAvailable) from ValueError("why")
    except LockNotAvailable as error:
        error.__notes__ = ["in a test"]
        got = pickle.loads(pickle.dumps(error))
    assert (got.__notes__, got.__cause__, got.__traceback__) == (["in a test"], None, None)


@pytest.mark.parametrize("word", [Retry(after=timedelta(seconds=5)), Snooze(5), Cancel("not now")], ids=repr)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_retry_snooze_and_cancel_can_be_pickled_and_copied(word, way):
    got = way(word)
    assert (type(got), str(got), got.args, vars(got)) == (type(word), str(word), word.args, vars(word))
