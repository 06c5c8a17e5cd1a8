"""procrastinate, with its default worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from bench.contestants.base import Contestant, main, nothing, sleep, stamp


class Procrastinate(Contestant):
    name = "procrastinate"
    packages = ("procrastinate", "psycopg[binary]")
    slowness = 30
    unfinished = "SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing') AND task_name LIKE %s"


class Producer:
    """The app and its functions."""

    def __init__(self) -> None:
        import procrastinate

        self.app = procrastinate.App(connector=procrastinate.PsycopgConnector())
        self.tasks = {each.__name__: self.app.task(name=each.__name__)(each) for each in (nothing, sleep, stamp)}

    def setup(self) -> None:
        self.app.schema_manager.apply_schema()

    def one(self, function: str, *arguments: Any) -> None:
        self.tasks[function].defer(**named(function, arguments))

    def many(self, count: int, function: str, *arguments: Any) -> None:
        self.tasks[function].batch_defer(*[named(function, arguments)] * count)

    def keyed(self, count: int, function: str, keys: int) -> None:
        """Each job has a lock of its own, and a batch has one for all, so they are deferred one by one."""
        task, option = self.tasks["nothing"], {"locked": "lock", "unique": "queueing_lock"}[function]
        for number in range(count):
            task.configure(**{option: f"key {number % keys}"}).defer()


def named(function: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return arguments by the names that the function gives them."""
    return dict(zip(("seconds",) if function == "sleep" else ("sent",), arguments, strict=False))


if __name__ == "__main__":
    producer = Producer()
    if sys.argv[1] == "worker":
        producer.app.run_worker(concurrency=int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    else:
        with producer.app.open():
            main(setup=producer.setup, one=producer.one, many=producer.many, keyed=producer.keyed)
