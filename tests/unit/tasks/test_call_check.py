"""A call is refused when it is enqueued if, and only if, Python would refuse it when a worker makes it."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from django_pglock.errors import TaskArgumentsError
from django_pglock.tasks.call_check import check_call


def send(order_id: int, copy: bool = False, *, urgent: bool = False) -> None: ...
def keyword_only(*, order_id): ...
def positional_only(order_id, /): ...
def anything(*args, **kwargs): ...
def with_context(context, order_id): ...


@functools.wraps(with_context)
def injecting(*args, **kwargs):
    return with_context("a context of its own", *args, **kwargs)


def refusal(function, args, kwargs, *, takes_context=False, group=None):
    task = SimpleNamespace(func=function, takes_context=takes_context, group=group, module_path="shop.tasks.send")
    try:
        check_call(task, args, kwargs)
    except TaskArgumentsError as error:
        return str(error)
    return None


CALLS = [((), {}), ((1,), {}), ((1, 2), {}), ((1, 2, 3), {}), ((), {"order_id": 1}), ((1,), {"order_id": 1})]
CALLS += [((1,), {"urgent": 2}), ((1,), {"copy": 2}), ((1,), {"orderid": 2}), ((), {"copy": 1})]


@pytest.mark.parametrize("takes_context", [False, True])
@pytest.mark.parametrize("function", [send, keyword_only, positional_only, anything, with_context, injecting])
def test_the_call_check_refuses_exactly_the_calls_that_python_refuses(function, takes_context):
    for args, kwargs in CALLS:
        try:
            function(*[None] * takes_context, *args, **kwargs)
        except TypeError:
            is_wrong = function is not injecting  # the function takes all arguments, and fails inside
        else:
            is_wrong = False
        assert bool(refusal(function, args, kwargs, takes_context=takes_context)) is is_wrong, (args, kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing a required argument: 'order_id'"),
        ((1,), {"orderid": 1}, "got an unexpected keyword argument 'orderid'"),
        ((1, 2, 3), {}, "got too many positional arguments"),
        ((1,), {"order_id": 1}, "got multiple values for argument 'order_id'"),
    ],
)
def test_the_call_check_gives_the_message_of_python_and_the_signature(args, kwargs, said):
    expected = f"shop.tasks.send() {said}. It takes (order_id, copy=False, *, urgent=False)."
    assert refusal(send, args, kwargs) == expected


def test_the_context_is_not_shown_because_the_worker_adds_it():
    assert refusal(with_context, (), {}, takes_context=True).endswith("It takes (order_id).")


def test_calls_of_a_group_are_not_calls_of_the_function():
    assert refusal(send, (), {"orderid": 1}, group="shop") is None


def test_a_function_without_a_signature_is_not_checked():
    assert refusal(getattr, (), {"nothing": 1}) is None
