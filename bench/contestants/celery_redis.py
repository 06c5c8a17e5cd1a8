"""Celery with Redis: its default worker, no results.

Celery has no call for many tasks, and takes a task from Redis for good before it runs it, so the last few may count as
finished that are running.
"""

from __future__ import annotations

from typing import Any

from bench.contestants.base import main, nothing, repeat, sleep, stamp
from bench.contestants.redis_server import RedisContestant


class CeleryRedis(RedisContestant):
    name = "Celery with Redis"
    packages = ("celery[redis]", "redis")
    slowness = 10

    def left(self, database: Any, function: str) -> int:
        return self.ask("LLEN celery") + self.ask("HLEN unacked")


class Producer:
    """The app and its functions."""

    def __init__(self) -> None:
        import os

        import celery

        self.app = celery.Celery("bench", broker=f"redis+socket://{os.environ['BENCH_REDIS']}")
        self.app.conf.task_ignore_result = True
        self.tasks = {each.__name__: self.app.task(name=each.__name__)(each) for each in (nothing, sleep, stamp)}

    def one(self, function: str, *arguments: Any) -> None:
        self.tasks[function].delay(*arguments)

    def many(self, count: int, function: str, *arguments: Any) -> None:
        repeat(count, lambda: self.one(function, *arguments))

    def worker(self, *at_once: str) -> None:
        options = ["--concurrency", *at_once] if at_once else []
        self.app.worker_main(["worker", "--loglevel", "WARNING", *options])


if __name__ == "__main__":
    producer = Producer()
    main(setup=lambda: None, one=producer.one, many=producer.many, worker=producer.worker)
