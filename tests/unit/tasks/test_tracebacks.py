"""Values that are read from the text of a traceback."""

from __future__ import annotations

import pytest

from django_pglock.tasks.tracebacks import LONGEST_MESSAGE, function_of, message_in, place_in

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


def trace_of(call):
    with pytest.raises(ValueError, match="no") as caught:
        call()
    return caught.tb


def test_the_function_is_that_of_the_last_own_frame():
    """Files of libraries are recognised by their path."""
    own, library = {"__name__": "shop.bank"}, {"__name__": "requests.api"}
    exec(compile("def post():\n    raise ValueError('no')", "/srv/venv/site-packages/requests/api.py", "exec"), library)
    exec(compile("def pay(post):\n    post()", "/srv/shop/bank.py", "exec"), own)
    assert function_of(trace_of(lambda: own["pay"](library["post"]))) == "shop.bank:pay"
    only_library = trace_of(library["post"]).tb_next
    assert function_of(only_library) == "requests.api:post"
    assert function_of(None) == ""
