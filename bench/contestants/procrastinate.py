"""procrastinate, with its default worker."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from bench.contestants.base import COROUTINE, LOCKED, Contestant, main, nothing, sleep, stamp


class Procrastinate(Contestant):
    name = "procrastinate"
    packages = ("procrastinate", "psycopg[binary]")
    slowness = 30
    naps = {**Contestant.naps, COROUTINE: "sleep_async", LOCKED: "sleep"}
    unfinished = "SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing') AND task_name LIKE %s"


async def sleep_async(seconds: float) -> None:
    """Wait in a coroutine."""
    await asyncio.sleep(seconds)


class Producer:
    """The app and its functions."""

    def __init__(self) -> None:
        import procrastinate

        self.app = procrastinate.App(connector=procrastinate.PsycopgConnector())
        functions = (nothing, sleep, sleep_async, stamp)
        self.tasks = {each.__name__: self.app.task(name=each.__name__)(each) for each in functions}

    def setup(self) -> None:
        self.app.schema_manager.apply_schema()

    def one(self, function: str, *arguments: Any) -> None:
        self.tasks[function].defer(**named(function, arguments))

    def many(self, count: int, function: str, *arguments: Any) -> None:
        self.tasks[function].batch_defer(*[named(function, arguments)] * count)

    def keyed(self, count: int, function: str, keys: int, *arguments: Any) -> None:
        """Each job has a lock of its own, and a batch has one for all, so they are deferred one by one."""
        name = "sleep" if function == "locked_sleep" else "nothing"
        option = "queueing_lock" if function == "unique" else "lock"
        for number in range(count):
            self.tasks[name].configure(**{option: f"key {number % keys}"}).defer(**named(name, arguments))


def named(function: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return arguments by the names that the function gives them."""
    return dict(zip(("sent",) if function == "stamp" else ("seconds",), arguments, strict=False))


if __name__ == "__main__":
    producer = Producer()
    if sys.argv[1] == "worker":
        producer.app.run_worker(concurrency=int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    else:
        with producer.app.open():
            main(setup=producer.setup, one=producer.one, many=producer.many, keyed=producer.keyed)
