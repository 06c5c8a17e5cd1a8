"""``run_steps()``: a function with steps in memory, without a database."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from datetime import datetime, timedelta

import pytest

from django_pglock import Cancel, task
from django_pglock.errors import EventTimeout, StepError, StepFailed, TaskResultError
from django_pglock.testing import run_steps

#: The parts that were called, and how often the functions were.
CALLS: list[str] = []
RUNS = itertools.count()


@pytest.fixture(autouse=True)
def _fresh():
    global RUNS
    CALLS.clear()
    RUNS = itertools.count()


def part(name, *args, **kwargs):
    CALLS.append(name)
    return name


async def apart(name):
    return part(name)


@task(takes_context=True, max_attempts=3)
def order(context, number, *, gift=False):
    CALLS.append("run")
    charge = context.step("charge", part, "charge", key=context.idempotency_key("charge"))
    context.atomic_step("book", part, "book", charge)
    context.sleep("night", timedelta(hours=8))
    try:
        packed = context.wait_for(f"packed:{number}", timeout=timedelta(days=7))
    except EventTimeout:
        return "late"
    if gift:
        context.step("wrap", part, "wrap")
    context.step("mail", part, "mail", packed)
    return [charge, packed]


@task(takes_context=True)
async def aorder(context):
    charge = await context.astep("charge", apart, "charge")
    context.sleep("until the end", datetime.max)
    return [charge, context.wait_for("packed", timeout=None)]


@task(takes_context=True)
def trip(context):
    context.step("flight", part, "flight")
    try:
        context.step("hotel", part, "hotel")
    except StepFailed as error:
        context.step("undo", part, "undo", error.message)
        raise Cancel("undone") from error


@task(takes_context=True)
def wrong(context, how):
    """Use steps in a way that only a second run shows."""
    run = next(RUNS)
    if how == "another name":
        context.step(f"a {random.random()}", part, "a")
    context.step("first", part, "first", run if how == "another argument" else 0)
    if how == "a step more" and run:
        context.step("more", part, "more")
    context.step("second", part, "second", object(), at=run - 1 if how == "another option" else None)
    if how != "a step less" or run < 2:
        context.step("third", part, "third", [1, 2], at=datetime(2026, 1, 1))
    if how == "swallows":
        with contextlib.suppress(BaseException):
            context.sleep("nap", 60)
    return run if how == "another value" else None


@task(takes_context=True)
def asking(context):
    for name in ("a", "b"):
        if name not in context.steps:
            context.step(name, part, name)


@task
def child(number):
    CALLS.append(f"child {number}")
    return 12 // number


@task(takes_context=True)
def parent(context, numbers):
    results = context.gather("children", (child.call_of(number) for number in numbers))
    return context.step("sum", sum, [each.return_value for each in results if each.status == "SUCCESSFUL"])


@task(takes_context=True)
def failing(context, how):
    if how == "in a step":
        context.step("fails", part, "fails")
        context.step("raises", [].pop)
    if how == "no JSON":
        context.step("object", object)
    raise LookupError("of the function")


@task
def without(number):
    return number


@task(takes_context=True, atomic=True)
def atomic(context):
    context.step("never", part, "never")


def test_each_step_runs_once_although_the_function_runs_again_after_each():
    run = run_steps(order, 7, events={"packed:7": {"number": "RR1"}}, gift=True)
    assert run.return_value == ["charge", {"number": "RR1"}]
    assert run.steps == {
        "charge": "charge",
        "book": "book",
        "night": None,
        "packed:7": {"number": "RR1"},
        "wrap": "wrap",
        "mail": "mail",
    }
    assert [each for each in CALLS if each != "run"] == ["charge", "book", "wrap", "mail"]
    assert CALLS.count("run") == 7, "once for each step, and once more to compare what it returns"


def test_it_is_interrupted_only_after_one_step_and_where_it_suspends():
    run_steps(order, 7, events={"packed:7": None}, interrupt_after="book")
    assert CALLS == ["run", "charge", "book", "run", "run", "run", "mail", "run"]


def test_an_event_without_a_payload_does_not_come():
    assert run_steps(order, 7).return_value == "late"
    with pytest.raises(StepError, match=r"'packed' waits without end for 'packed'. Give events="):
        run_steps(aorder)


def test_a_coroutine_is_run_as_well():
    assert run_steps(aorder, events={"packed": [1]}).return_value == ["charge", [1]]
    assert CALLS == ["charge"]


def test_a_step_fails_that_the_test_lets_fail():
    with pytest.raises(Cancel, match="undone") as cancelled:
        run_steps(trip, fail={"hotel": ConnectionError("full")})
    assert isinstance(cancelled.value.__cause__, StepFailed)
    assert CALLS == ["flight", "undo"]
    assert run_steps(trip).steps == {"flight": "flight", "hotel": "hotel"}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("another name", "The function calls the step 'a .*' where an earlier run has called 'a "),
        ("another argument", "The argument 1 of the step 'first' was '0', and now '1'"),
        ("another option", "The argument 'at' of the step 'second' was '-1', and now '0'"),
        ("a step more", "The function calls the step 'more' where an earlier run has called 'second'"),
        ("a step less", "The function returns where an earlier run has called the step 'third'"),
        ("another value", "The function has returned 2, and then 3"),
    ],
)
def test_the_first_difference_between_two_runs_is_reported(how, why):
    with pytest.raises(AssertionError, match=why):
        run_steps(wrong, how)


def test_what_a_worker_refuses_is_refused():
    with pytest.raises(StepError, match="has returned after 'nap' has suspended"):
        run_steps(wrong, "swallows")
    with pytest.raises(TaskResultError, match="'object' cannot be stored as JSON"):
        run_steps(failing, "no JSON")
    for function in (without, atomic):
        with pytest.raises(StepError, match="cannot have steps"):
            run_steps(function)


def test_objects_without_a_comparison_are_no_difference():
    assert run_steps(wrong, "right").return_value is None


def test_a_step_for_which_the_function_asks_may_be_left_out():
    assert run_steps(asking).steps == {"a": "a", "b": "b"}
    assert CALLS == ["a", "b"]


def test_other_exceptions_are_those_of_the_test():
    with pytest.raises(IndexError):
        run_steps(failing, "in a step")
    with pytest.raises(LookupError, match="of the function"):
        run_steps(failing, "")


@pytest.mark.parametrize(("numbers", "total"), [([3, 0, 4], 7), ([], 0)])
def test_children_run_once_in_the_thread_of_the_test(numbers, total):
    run = run_steps(parent, numbers)
    assert run.return_value == total
    assert [f"child {number}" for number in numbers] == CALLS
    assert [each.status for each in run.steps["children"]] == ["SUCCESSFUL", "FAILED", "SUCCESSFUL"][: len(numbers)]


@pytest.mark.parametrize("options", [{"fail": {"hotl": KeyError()}}, {"interrupt_after": "hotl"}])
def test_the_name_of_a_step_that_is_not_there_is_refused(options):
    with pytest.raises(ValueError, match=r"There is no step 'hotl'. The function has called \['flight', 'hotel'\]"):
        run_steps(trip, **options)


def test_it_does_not_block_an_event_loop():
    async def caller():
        run_steps(order, 7)

    with pytest.raises(Exception, match="sync_to_async"):
        asyncio.run(caller())
