"""The sleep and the wake-ups of real workers are a run of wake.pml. A forged history is not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from django.db import connection

from django_pglock.models import Task, Worker
from qa.model.recorder import Event, History, accepted
from qa.model.wakes import recording_wakes, wake_history
from tests.conftest import NEVER, ROOT
from tests.warm.process import start

PROGRAM = Path(__file__).with_name("producer.py")
#: Seconds before a task: within the memory of a producer, near its end, and after it.
PAUSES = (0.0, 0.0, 0.01, 0.04, 0.05, 0.06, 0.1, 0.3)
#: Ends the session in which one worker beats and listens.
CUT_OFF = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'lockworker heartbeat' LIMIT 1
"""


def are_runs(*histories: History) -> list[bool]:
    return accepted("wake", histories, "-DWORKERS=2", "-DPRODUCERS=2", "-DTASKS=99", "-DFAULTS=1")


def producer(number: int, pauses: list[float]) -> subprocess.Popen[str]:
    """Start a process that enqueues a task after each pause."""
    server, _, _ = os.environ["DATABASE_URL"].rpartition("/")
    settings = {"DJANGO_SETTINGS_MODULE": "tests.settings_no_poll", "PYTHONPATH": str(ROOT)}
    return start(
        [sys.executable, str(PROGRAM), str(number), ",".join(map(str, pauses))],
        env={**os.environ, **settings, "DATABASE_URL": f"{server}/{connection.settings_dict['NAME']}"},
        text=True,
    )


@pytest.mark.django_db(transaction=True)
def test_the_sleep_of_real_workers_is_a_run_of_the_model(worker_process, eventually):
    """Two workers and two producers. A listener loses its session, and later both workers lose their rows."""

    def are_asleep() -> bool:
        return Worker.objects.filter(is_sleeping=True).count() == 2

    def all_have_run() -> bool:
        return not Task.objects.filter(finished_at=None).exists()

    shuffled = random.Random(1)
    with recording_wakes():
        assert producer(0, [0.0]).wait(NEVER) == 0, "before there are workers"
        for _ in range(2):
            worker_process(DJANGO_SETTINGS_MODULE="tests.settings_no_poll")
        eventually(are_asleep, why="the workers do not sleep")
        producers = [producer(number, shuffled.sample(PAUSES, len(PAUSES))) for number in range(2)]
        with connection.cursor() as cursor:
            cursor.execute(CUT_OFF)
            assert cursor.fetchall() == [(True,)]
        assert [each.wait(NEVER) for each in producers] == [0, 0]
        eventually(all_have_run, why="a worker sleeps beside a ready task")
        eventually(are_asleep, why="the workers do not sleep any more")
        Worker.objects.all().delete()
        # A worker without a row counts as dead: what it claims would be taken back.
        eventually(are_asleep, why="the workers have not got their rows back, and asked for news again")
        assert producer(0, [0.1]).wait(NEVER) == 0
        eventually(all_have_run, why="workers sleep beside a ready task after they have lost their rows")
        history = wake_history()

    kinds = [event.kind for event in history]
    assert {"NOTIFIED", "NOBODY", "CLAIMED", "ASKED", "REMOVED", "REGISTERED"} <= set(kinds)
    assert kinds.count("CLAIMED") == kinds.count("INSERTED") == 2 * len(PAUSES) + 2
    assert are_runs(history) == [True], history


def of(text: str) -> History:
    """Return the events of words such as ``INSERTED0``."""
    return tuple(Event(word[:-1], int(word[-1])) for word in text.split())


POSSIBLE = {
    "a sleeping worker is notified": "ASKED0 INSERTED0 NOTIFIED0 CLAIMED0",
    "a producer that has seen nobody relies on that": "INSERTED0 NOBODY0 INSERTED0 RELIED0 CLAIMED0 CLAIMED0",
    "the second look finds it": "INSERTED0 NOBODY0 CLAIMED0 ASKED0 INSERTED0 RELIED0 CLAIMED0",
    "a question before the commit of the flag": "ASKED0 INSERTED0 NOBODY0 CLAIMED0",
    "a row that was removed": "ASKED0 REMOVED0 INSERTED0 NOBODY0 REGISTERED0 CLAIMED0",
}
FORGED = {
    "a claim of nothing": "ASKED0 CLAIMED0",
    "two claims of one task": "INSERTED0 NOBODY0 CLAIMED0 CLAIMED1",
    "a notification although nobody sleeps": "INSERTED0 NOTIFIED0 CLAIMED0",
    "a memory of nothing": "INSERTED0 RELIED0 CLAIMED0",
    "a memory of somebody asleep": "ASKED0 INSERTED0 NOTIFIED0 INSERTED0 RELIED0",
    "a task of which nobody asks": "INSERTED0 INSERTED0",
    "a question before the task": "NOBODY0 INSERTED0",
    "nobody, beside a worker that sleeps": "ASKED0 INSERTED0 NOTIFIED0 CLAIMED0 INSERTED0 NOBODY0",
    "a worker that asks twice": "ASKED0 ASKED0",
}


def test_a_forged_history_of_sleep_is_no_run_of_the_model():
    histories = {**POSSIBLE, **FORGED}
    found = are_runs(*map(of, histories.values()))
    assert {name for name, is_one in zip(histories, found, strict=True) if is_one} == set(POSSIBLE)
