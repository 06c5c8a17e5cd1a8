"""chancy, whose queue runs coroutines and looks for more as soon as one has ended."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

from bench.contestants import base
from bench.contestants.base import Contestant, main

#: Of its executors (processes, threads, coroutines) coroutines are the fastest here.
AT_ONCE = 100


class Chancy(Contestant):
    name = "chancy"
    packages = ("chancy", "psycopg[binary]")
    slowness = 10
    unfinished = "SELECT FROM chancy_jobs WHERE state IN ('pending', 'running', 'retrying') AND func LIKE '%%.' || %s"


async def nothing() -> None:
    """Do nothing."""


async def sleep(seconds: float) -> None:
    """Wait, as a task does that waits for another service."""
    await asyncio.sleep(seconds)


async def stamp(sent: float) -> None:
    """Note how long ago ``sent`` is."""
    base.stamp(sent)


def _app() -> Any:
    from chancy import Chancy as App

    # The address is in libpq's own variables. Its log has two lines for each job.
    log = logging.getLogger("chancy")
    log.setLevel(logging.ERROR)
    return App("application_name=chancy", log=log)


def _jobs(function: str, arguments: Sequence[Any], count: int) -> list[Any]:
    from chancy import Job

    # Under its own name: as a program this module is called __main__.
    path = f"bench.contestants.chancy_queue.{function}"
    names = ("seconds",) if function == "sleep" else ("sent",)
    job = Job(func=path, kwargs=dict(zip(names, arguments, strict=False)), queue="default")
    return [job] * count


async def _setup() -> None:
    from chancy import Chancy as App
    from chancy import Queue

    async with _app() as app:
        await app.migrate()
        await app.declare(
            Queue(name="default", concurrency=AT_ONCE, executor=App.Executor.Async, eager_polling=True), upsert=True
        )


def _many(app: Any, count: int, function: str, *arguments: Any) -> None:
    for _ in app.sync_push_many(_jobs(function, arguments, count)):
        pass


async def _work() -> None:
    from chancy import Worker

    async with _app() as app, Worker(app) as worker:
        await worker.wait_for_shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        asyncio.run(_work())
    elif sys.argv[1] == "setup":
        asyncio.run(_setup())
    else:
        with _app() as own:
            main(
                setup=lambda: None,
                one=lambda function, *arguments: own.sync_push(_jobs(function, arguments, 1)[0]),
                many=lambda *arguments: _many(own, *arguments),
            )
