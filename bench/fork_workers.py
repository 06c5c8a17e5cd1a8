"""Worker processes by fork: the program that ``bench/fleet.py`` runs to have hundreds of them soon.

It starts Django and imports what a worker imports, once. Then it reads lines, forks a process for each, or for each
worker, and prints a line of JSON. Each worker is what ``runlockworker`` runs: a parent, which starts children.

- ``workers COUNT GRACE PROCESSES`` starts workers with so many children each, and prints their process ids;
- ``many COUNT FUNCTION ARGUMENT...`` enqueues calls in one transaction;
- ``trickle COUNT RATE`` enqueues calls of ``stamp`` one by one, so many a second on average.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.contestants import django_project


def work(grace: float, processes: int) -> None:
    """Run a worker until a signal stops it."""
    from django_pglock.worker import Worker

    Worker(threads=4, grace=grace, processes=processes).run()


def many(count: int, name: str, arguments: list[float]) -> None:
    """Enqueue so many calls at once."""
    from django.db import transaction

    from django_pglock.tasks import enqueue_many

    with transaction.atomic():
        enqueue_many(django_project.function(name), (tuple(arguments) for _ in range(count)))


def trickle(count: int, rate: float) -> None:
    """Enqueue one call after the other, at random moments."""
    stamp = django_project.function("stamp")
    for _ in range(count):
        stamp.enqueue(time.time())
        time.sleep(random.expovariate(rate))


def forked(call: Callable[[], Any]) -> int:
    """Run a call in a child and return its process id."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        call()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        logging.exception("a process of the fleet failed")
    finally:
        os._exit(code)


def answer(verb: str, words: list[str]) -> list[int]:
    """Do what a line asks for; return the ids of the processes that do it."""
    if verb == "workers":
        return [forked(lambda: work(float(words[1]), int(words[2]))) for _ in range(int(words[0]))]
    if verb == "many":
        count, name, *arguments = words
        child = forked(lambda: many(int(count), name, list(map(float, arguments))))
    else:
        child = forked(lambda: trickle(int(words[0]), float(words[1])))
    # The kernel reaps children whose signal is ignored, and waitpid() then returns when all have ended.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    return []


def main() -> None:
    """Answer lines until there are no more."""
    django_project.begin()
    from bench.app import tasks  # noqa: F401 - for the workers
    from django_pglock.worker.worker import Worker  # noqa: F401

    # The children share these objects with us as long as nobody writes to them.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("[]", flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        print(json.dumps(answer(verb, words)), flush=True)


if __name__ == "__main__":
    main()
