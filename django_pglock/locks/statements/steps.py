"""Steps: a generator that yields statements, so that threads and coroutines send the same ones in the same order.

A generator yields a statement, gets the row of the answer or the error of the statement, and returns the row that says
which lock was granted. If the steps cannot know what the session holds, they yield ``END_SESSION`` instead of a
statement, because no lock remains after the end of the session. Threads run the steps on Django's connection,
coroutines in a separate session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

Row = Sequence[Any]
#: For a statement without rows, None is sent to the generator.
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
    """Run steps and return their result. ``send`` sends a statement and returns its row, or ends the session."""
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
    """Do the same as ``run_steps``, in a coroutine."""
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
