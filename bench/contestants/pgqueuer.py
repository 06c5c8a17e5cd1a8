"""PgQueuer, a hundred jobs at a time, with asyncpg and uvloop: the driver and the loop that it recommends.

The worker is what ``pgq run --batch-size 100`` runs, without the command: that of 1.6.0 does not start with the typer
that pip installs today ("'str' object has no attribute 'name'").
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.contestants.base import Contestant, main, nothing, stamp


class PgQueuer(Contestant):
    name = "PgQueuer, batch 100"
    packages = ("pgqueuer[asyncpg]",)
    # A finished job moves into the log.
    unfinished = "SELECT FROM pgqueuer WHERE entrypoint LIKE %s"


def worker() -> None:
    import pgqueuer
    import uvloop

    uvloop.run(pgqueuer.run(factory, batch_size=100))


@asynccontextmanager
async def factory() -> AsyncIterator[Any]:
    """Yield the worker; its functions are coroutines, which PgQueuer runs faster than threads."""
    import asyncpg
    from pgqueuer import PgQueuer as Worker
    from pgqueuer.db import AsyncpgDriver

    worker = Worker(AsyncpgDriver(await asyncpg.connect()))

    @worker.entrypoint("nothing")
    async def _nothing(job: Any) -> None:
        nothing()

    @worker.entrypoint("stamp")
    async def _stamp(job: Any) -> None:
        stamp(float(job.payload))

    yield worker


class Producer:
    """Enqueues on one connection and one loop that stay."""

    def __init__(self) -> None:
        import asyncpg
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        self.loop = asyncio.new_event_loop()
        self.queries = Queries(AsyncpgDriver(self.wait(asyncpg.connect())))

    def wait(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def setup(self) -> None:
        self.wait(self.queries.install())

    def one(self, function: str, *arguments: Any) -> None:
        self.wait(self.queries.enqueue(function, str(*arguments).encode()))

    def many(self, count: int, function: str) -> None:
        self.wait(self.queries.enqueue([function] * count, [None] * count, [0] * count))


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker()
    else:
        producer = Producer()
        main(setup=producer.setup, one=producer.one, many=producer.many)
