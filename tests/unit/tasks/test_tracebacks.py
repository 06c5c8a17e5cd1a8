"""What is read out of the text of a traceback."""

from __future__ import annotations

import pytest

from django_pglock.tasks.tracebacks import message_in, place_in

TRACE = """Traceback (most recent call last):
  File "/srv/shop/tasks.py", line 12, in charge
    bank.pay(order)
  File "/srv/shop/bank.py", line 88, in pay
    post(url)
  File "/srv/venv/lib/python3.12/site-packages/requests/api.py", line 115, in post
    raise ConnectionError("refused: try later")
requests.exceptions.ConnectionError: refused: try later
"""


@pytest.mark.parametrize(
    ("trace", "place"),
    [
        (TRACE, "bank.py:88"),
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
