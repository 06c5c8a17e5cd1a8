"""django_pglock, as it is in this checkout."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from bench.contestants import django_project
from bench.contestants.base import ATOMIC, COROUTINE, LOCKED, Contestant, main


class Ours(django_project.DjangoContestant):
    name = "django_pglock"
    worker_name = "runlockworker"
    naps = {**Contestant.naps, ATOMIC: "sleep_atomically", COROUTINE: "sleep_async", LOCKED: "locked_sleep"}
    # The first condition is that of the index. What is blocked is not among what is measured.
    unfinished = """SELECT FROM django_pglock_task
        WHERE status <> 'SUCCESSFUL' AND status IN ('READY', 'RUNNING', 'FAILED') AND task_path LIKE '%%.' || %s"""

    def at_once(self, count: int) -> list[str]:
        return ["--threads", str(count)]

    def left(self, database: Any, function: str) -> int:
        if function in ("nothing", "sleep"):
            return super().left(database, function)
        unfinished = (
            "SELECT count(*) FROM django_pglock_task WHERE status <> 'SUCCESSFUL' AND task_path LIKE '%%.' || %s"
        )
        return database.execute(unfinished, (function,)).fetchone()[0]

    def version(self) -> str:
        return f"Django {version('django')}, psycopg {version('psycopg')}"


def many(count: int, function: str, *arguments: Any) -> None:
    from django_pglock.tasks import enqueue_many

    enqueue_many(django_project.function(function), (arguments for _ in range(count)))


def keyed(count: int, function: str, keys: int, *arguments: Any) -> None:
    from django_pglock.tasks import enqueue_many

    enqueue_many(django_project.function(function), ((number % keys, *arguments) for number in range(count)))


if __name__ == "__main__":
    django_project.begin()
    if sys.argv[1] == "cpu":
        from bench.app import enqueueing

        enqueueing.measure(int(sys.argv[2]))
    elif sys.argv[1] in ("records", "emits", "suspended"):
        from bench.app import stepping

        getattr(stepping, sys.argv[1])(int(sys.argv[2]))
    else:
        main(setup=django_project.setup, one=django_project.one, many=many, keyed=keyed)
