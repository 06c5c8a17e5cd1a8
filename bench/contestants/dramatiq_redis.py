"""dramatiq with Redis: one process with its default of eight threads, no results.

It has no call for many tasks. A message stays in Redis until it is acknowledged, after its function has run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from bench.contestants.base import main, nothing, repeat, sleep, stamp
from bench.contestants.redis_server import RedisContestant


class Dramatiq(RedisContestant):
    name = "dramatiq with Redis"
    packages = ("dramatiq[redis]", "redis")
    slowness = 10

    def worker(self, *options: str) -> Sequence[str]:
        program = [str(self.home / "bin" / "dramatiq"), "--processes", "1"]
        return [*program, *(["--threads", *options] if options else []), "bench.contestants.dramatiq_redis:broker"]

    def left(self, database: Any, function: str) -> int:
        return self.ask("HLEN dramatiq:default.msgs")


def broker() -> None:
    """Make the broker and its functions. The worker's program calls this by its name."""
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    dramatiq.set_broker(RedisBroker(url=f"unix://{os.environ['BENCH_REDIS']}"))
    for function in (nothing, sleep, stamp):
        actors[function.__name__] = dramatiq.actor(function, actor_name=function.__name__)


actors: dict[str, Any] = {}


def one(function: str, *arguments: Any) -> None:
    actors[function].send(*arguments)


if __name__ == "__main__":
    if sys.argv[1] != "setup":
        broker()
    main(
        setup=lambda: None,
        one=one,
        many=lambda count, function, *arguments: repeat(count, lambda: one(function, *arguments)),
    )
