"""What one call of ``enqueue()`` costs the server and the client: CPU time, which no busy machine disturbs.

``python -m bench.contestants.ours cpu COUNT`` prints, for each kind of call, microseconds of the server's CPU and of
the client's as JSON.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

from django.db import connection, transaction

from bench.app import tasks

#: Each kind is called in so many blocks, in an order that is drawn anew for each.
BLOCKS = 10
#: Calls before the clock starts: caches of the session.
WARM_UP = 20

numbers = count()


@cache
def awaited() -> Any:
    return tasks.numbered.enqueue(-1)


def in_transaction(call: Callable[[], Any]) -> Callable[[], Any]:
    def inner() -> None:
        with transaction.atomic():
            call()

    return inner


KINDS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: tasks.numbered.enqueue(next(numbers)),
    "lock=, a key of its own": lambda: tasks.locked.enqueue(next(numbers)),
    "lock=, one key for all": lambda: tasks.locked.enqueue(-1),
    "lock=, concurrency=": lambda: tasks.locked_thrice.enqueue(next(numbers)),
    "rate=": lambda: tasks.rated.enqueue(next(numbers)),
    "rate=, behind others that wait": lambda: tasks.rated_slowly.enqueue(next(numbers)),
    "unique=": lambda: tasks.unique.enqueue(next(numbers)),
    "unique=, one that is there": lambda: tasks.unique.enqueue(-1),
    "unique= and lock=": lambda: tasks.unique_and_locked.enqueue(next(numbers)),
    "rate= and lock=": lambda: tasks.rated_and_locked.enqueue(next(numbers)),
    "group=": lambda: tasks.grouped.enqueue(number=next(numbers)),
    "group=, one for all": lambda: tasks.grouped.enqueue(number=-1),
    "fair=": lambda: tasks.fair.enqueue(next(numbers)),
    "keep_result=": lambda: tasks.kept.enqueue(next(numbers)),
    "after=": lambda: tasks.numbered.using(after=[awaited()]).enqueue(next(numbers)),
    "run_after=": lambda: tasks.numbered.using(run_after=timedelta(hours=1)).enqueue(next(numbers)),
}
KINDS["nothing, in a transaction"] = in_transaction(KINDS["nothing"])
KINDS["lock=, in a transaction"] = in_transaction(KINDS["lock=, a key of its own"])
KINDS["unique=, in a transaction"] = in_transaction(KINDS["unique="])
KINDS["rate=, in a transaction"] = in_transaction(KINDS["rate="])
KINDS["rate= and lock=, in a transaction"] = in_transaction(KINDS["rate= and lock="])


def measure(calls: int) -> None:
    """Print the CPU time of each kind of call: of the server, of the client, in microseconds."""
    server, client = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
    for call in KINDS.values():
        repeat(WARM_UP, call)
    for kind in (kind for _ in range(BLOCKS) for kind in random.sample(sorted(KINDS), len(KINDS))):
        before, began = server_time(), time.thread_time()
        repeat(calls // BLOCKS, KINDS[kind])
        client[kind] += time.thread_time() - began
        server[kind] += server_time() - before
    made = calls // BLOCKS * BLOCKS
    print(json.dumps({kind: (1e6 * server[kind] / made, 1e6 * client[kind] / made) for kind in KINDS}))


def server_time() -> float:
    """Return the seconds of CPU that the session's process has used. Linux, the server on this machine."""
    with open(f"/proc/{connection.connection.info.backend_pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def repeat(times: int, call: Callable[[], Any]) -> None:
    for _ in range(times):
        call()
