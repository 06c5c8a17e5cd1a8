"""Steps: threads and coroutines have the same conversation with the server."""

from __future__ import annotations

import asyncio

import pytest

from django_pglock.locks.statements import END_SESSION, Busy, granted, run_steps, run_steps_async


def steps():
    """Ask twice. The answer to the second question is an error, after which the session ends."""
    row = yield "first"
    try:
        yield f"second, after {row}"
    except ZeroDivisionError:
        assert (yield END_SESSION) is None
    return row


class Server:
    """What was asked. A question that begins with "second" gets an error."""

    def __init__(self):
        self.asked = []

    def send(self, statement):
        self.asked.append(statement)
        if statement.startswith("second"):
            raise ZeroDivisionError
        return None if statement == END_SESSION else (True,)

    async def asend(self, statement):
        await asyncio.sleep(0)
        return self.send(statement)


CALLS = [
    lambda steps, server: run_steps(steps, server.send),
    lambda steps, server: asyncio.run(run_steps_async(steps, server.asend)),
]


@pytest.mark.parametrize("run", CALLS, ids=["threads", "coroutines"])
def test_steps_get_each_answer_and_each_error_and_return_their_own_row(run):
    server = Server()
    assert run(steps(), server) == (True,)
    assert server.asked == ["first", "second, after (True,)", END_SESSION]


@pytest.mark.parametrize("run", CALLS, ids=["threads", "coroutines"])
def test_an_error_that_the_steps_do_not_expect_is_passed_on(run):
    def simple():
        yield "second"

    with pytest.raises(ZeroDivisionError):
        run(simple(), Server())


@pytest.mark.parametrize("row", [None, (None,), (False,), (False, "1s")])
def test_only_a_row_that_says_so_grants_a_lock(row):
    with pytest.raises(Busy):
        granted(row)
    assert granted((True, "1s")) == (True, "1s")
