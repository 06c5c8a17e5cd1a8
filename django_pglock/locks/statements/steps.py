"""Steps: a generator that yields statements, so that threads and coroutines send the same ones in the same order.

A generator yields a statement, gets the row of the answer or the error that the statement met, and returns the row that
says what was granted. Where the steps cannot know what the session holds they yield ``END_SESSION`` instead of a
statement: without the session no lock remains. Threads run the steps on Django's connection, coroutines on a session of
their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

Row = Sequence[Any]
#: What is sent for a statement that has no rows is None.
Steps = Generator[str, "Row | None", "Row | None"]
#: Not a statement: end the session.
END_SESSION = ""


class Busy(Exception):
    """Another session holds the lock. The cause is the server's own error, if the server waited for the lock."""


class StaleSnapshot(Exception):
    """The transaction would not see what the last holder has committed. Nothing was locked."""


def granted(row: Row | None) -> Row:
    """Return the row of an answer whose first column says that the lock was granted. Raises ``Busy``."""
    if row is None or not row[0]:
        raise Busy
    return row


def run_steps(steps: Steps, send: Callable[[str], Row | None]) -> Row | None:
    """Run steps and return their result. ``send`` sends a statement and returns its row, or obeys ``END_SESSION``."""
    try:
        statement = next(steps)
        while True:
            try:
                row = send(statement)
            except BaseException as error:  # noqa: BLE001, PERF203 - the steps decide
                statement = steps.throw(error)
            else:
                statement = steps.send(row)
    except StopIteration as end:
        answer: Row | None = end.value
        return answer


async def run_steps_async(steps: Steps, send: Callable[[str], Awaitable[Row | None]]) -> Row | None:
    """Run steps in a coroutine; as ``run_steps``."""
    try:
        statement = next(steps)
        while True:
            try:
                row = await send(statement)
            except BaseException as error:  # noqa: BLE001, PERF203 - the steps decide
                statement = steps.throw(error)
            else:
                statement = steps.send(row)
    except StopIteration as end:
        answer: Row | None = end.value
        return answer
