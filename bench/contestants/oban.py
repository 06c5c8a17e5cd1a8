"""Oban for Python, whose functions are coroutines."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from bench.contestants import base
from bench.contestants.base import COROUTINE, Contestant, main


class Oban(Contestant):
    name = "Oban for Python"
    packages = ("oban==0.7.0",)
    slowness = 10
    naps = {**Contestant.naps, COROUTINE: "sleep"}
    unfinished = (
        "SELECT FROM oban_jobs WHERE state IN ('available', 'executing', 'retryable') AND worker ILIKE '%%.' || %s"
    )


class Nothing:
    """Do nothing."""

    async def process(self, job: Any) -> None:
        pass


class Sleep:
    """Wait, as a job does that waits for another service."""

    async def process(self, job: Any) -> None:
        await asyncio.sleep(job.args["argument"])


class Stamp:
    """Note how long ago it was enqueued."""

    async def process(self, job: Any) -> None:
        base.stamp(job.args["argument"])


class Program:
    """An Oban that is connected, and what it can run."""

    def __init__(self, runner: asyncio.Runner, **options: Any) -> None:
        from oban import worker

        self.runner = runner
        self.kinds = {kind.__name__.lower(): worker(queue="default")(kind) for kind in (Nothing, Sleep, Stamp)}
        self.oban = runner.run(self._connect(options))

    async def _connect(self, options: dict[str, Any]) -> Any:
        from oban import Oban

        # The address is in libpq's own variables.
        return Oban(pool=await Oban.create_pool(dsn="application_name=oban", max_size=16), **options)

    def setup(self) -> None:
        import psycopg
        from oban.schema import install_sql

        with psycopg.connect("", autocommit=True) as connection:
            connection.execute(install_sql())

    def one(self, function: str, *arguments: Any) -> None:
        self.runner.run(self.oban.enqueue(self._job(function, arguments)))

    def many(self, count: int, function: str, *arguments: Any) -> None:
        for first in range(0, count, 1000):
            jobs = [self._job(function, arguments) for _ in range(first, min(first + 1000, count))]
            self.runner.run(self.oban.enqueue_many(jobs))

    def work(self) -> None:
        """Run jobs until the process is killed."""
        self.runner.run(self.oban.start())
        self.runner.run(asyncio.Event().wait())

    def _job(self, function: str, arguments: tuple[Any, ...]) -> Any:
        return self.kinds[function].new(dict(zip(("argument",), arguments, strict=False)))


if __name__ == "__main__":
    with asyncio.Runner() as loop:
        if sys.argv[1] == "worker":
            Program(loop, queues={"default": int(sys.argv[2]) if len(sys.argv) > 2 else 10}).work()
        else:
            program = Program(loop)
            main(setup=program.setup, one=program.one, many=program.many)
