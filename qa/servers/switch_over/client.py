"""A client process: it enqueues tasks of each kind and records, in a file, the result of each commit.

``python -m qa.servers.switch_over.client JOURNAL`` runs until SIGTERM.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, TextIO

import django
from django.db import Error as DatabaseFailure
from django.db import connection, transaction

#: Seconds between two transactions, or two attempts to connect.
PAUSE = 0.2
KEYS = 4


def main(path: str) -> None:
    """Enqueue until SIGTERM."""
    django.setup()
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    holder = threading.Thread(target=hold_a_lock, args=(path, over))
    with open(path, "a") as journal:
        holder.start()
        number = 0
        while not over.wait(PAUSE):
            number += 1
            with suppress(DatabaseFailure):
                enqueue(journal, number)
        holder.join()


def note(journal: TextIO, **what: Any) -> None:
    """Write one line to the disk."""
    journal.write(json.dumps({"at": time.time(), **what}) + "\n")
    journal.flush()


def enqueue(journal: TextIO, number: int) -> None:
    """Enqueue one task of each kind in one transaction: its ids before COMMIT, then what became of it."""
    from tests.sample import chaos_tasks, soak_tasks

    try:
        with transaction.atomic():
            results = [
                chaos_tasks.work.enqueue(0.02),
                chaos_tasks.work_atomically.enqueue(0.02),
                chaos_tasks.work_alone.enqueue(str(number % KEYS), 0.02),
                soak_tasks.work_in_coroutine.enqueue(0.02),
            ]
            # The id of a task that exists already, if one with this unique key is not finished.
            once = soak_tasks.work_once.enqueue(number % KEYS, 0.02)
            note(journal, ids=[int(result.id) for result in results], once=[int(once.id)])
    except DatabaseFailure:
        note(journal, committed=False)
        connection.close()
        raise
    note(journal, committed=True)


def hold_a_lock(path: str, over: threading.Event) -> None:
    """Hold a session lock forever, and write down each time that its loss is reported."""
    from django_pglock import LockLost, lock

    with open(path + ".lock", "a") as journal:
        while not over.is_set():
            try:
                with lock(path) as held:
                    note(journal, held=True)
                    while not over.wait(PAUSE):
                        held.assert_held()
            except LockLost:
                note(journal, held=False)
            except DatabaseFailure:  # no server takes writes yet
                over.wait(PAUSE)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
