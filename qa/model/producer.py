"""A process that enqueues tasks and records what it has learned about sleeping workers: ``producer.py NUMBER PAUSES``.

Each pause, in seconds and separated by commas, comes before one task. ``wakes.py`` has the table.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import django

django.setup()

from django_pglock.postgres.sessions import dedicated_connection  # noqa: E402
from django_pglock.store import wake  # noqa: E402
from qa.model.wakes import TELL  # noqa: E402
from tests.sample.tasks import nothing  # noqa: E402


def main(number: int, pauses: list[float]) -> None:
    """Enqueue a task after each pause."""
    # The record must be committed at once, independent of the other session.
    session = dedicated_connection("default", application_name="what a producer has learned")
    no_worker_sleeps, send = wake._no_worker_sleeps, wake.send

    def tell(kind: str) -> None:
        with session.cursor() as cursor:
            cursor.execute(TELL, (kind, number))

    def rely_on_memory(using: str, except_worker: Any = None) -> bool:
        answer = no_worker_sleeps(using, except_worker)
        if answer:
            tell("RELIED")
        return answer

    def ask(*arguments: Any) -> Any:
        answer = send(*arguments)
        tell("NOBODY" if answer is None else "NOTIFIED")
        return answer

    wake._no_worker_sleeps, wake.send = rely_on_memory, ask
    for pause in pauses:
        time.sleep(pause)
        nothing.enqueue(number)
    session.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), [float(each) for each in sys.argv[2].split(",")])
