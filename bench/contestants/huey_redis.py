"""huey with Redis: one process with its default of one thread, no results.

It has no call for many tasks, and deletes a task from Redis before it runs it, so the last one counts as finished that
is running.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bench.contestants.base import main, nothing, repeat, sleep, stamp
from bench.contestants.redis_server import RedisContestant


class Huey(RedisContestant):
    name = "huey with Redis"
    packages = ("huey", "redis")
    slowness = 10

    def worker(self, *options: str) -> Sequence[str]:
        program = [str(self.home / "bin" / "huey_consumer"), "bench.contestants.huey_redis.queue", "--quiet"]
        return [*program, *(["--workers", *options] if options else [])]

    def left(self, database: Any, function: str) -> int:
        return self.ask("LLEN huey.redis.bench")


class Program:
    """The queue and its functions."""

    def __init__(self) -> None:
        from huey import RedisHuey

        self.queue = RedisHuey("bench", results=False, url=f"unix://{os.environ['BENCH_REDIS']}")
        self.tasks = {each.__name__: self.queue.task(name=each.__name__)(each) for each in (nothing, sleep, stamp)}

    def one(self, function: str, *arguments: Any) -> None:
        self.tasks[function](*arguments)

    def many(self, count: int, function: str, *arguments: Any) -> None:
        repeat(count, lambda: self.one(function, *arguments))


def __getattr__(name: str) -> Any:
    """Make the queue when the consumer asks this module for it; the driver, which has no huey, never does."""
    if name == "queue":
        return Program().queue
    raise AttributeError(name)


if __name__ == "__main__":
    program = Program()
    main(setup=lambda: None, one=program.one, many=program.many)
