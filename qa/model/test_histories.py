"""The changes of rows by real workers are runs of the models. A forged history is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from django.db import connection, transaction

from django_pglock import Lease
from django_pglock.models import Lease as LeaseRow
from django_pglock.models import Task, Worker
from qa.model.recorder import Event, History, accepted, claims_of, keys_of, lease_history, recording, versions
from tests.conftest import NEVER, ROOT, WorkerProcess
from tests.sample import chaos_tasks
from tests.sample.models import Effect, Run
from tests.warm.process import start

KEYS = 4
#: Events that a model allows only a number of times.
FAULTS = {"RESCUE", "AGAIN", "GIVE_BACK"}


def are_runs(model: str, histories: list[History]) -> list[bool]:
    """Say of each history whether it is a run of the model."""
    faults = max(sum(event.kind in FAULTS for event in history) for history in histories)
    # One more, for events that no version of a row shows.
    sizes = (f"-DFAULTS={faults + 1}", "-DWORKERS=3", "-DTASKS=3", "-DHOLDERS=3", "-DTOKENS=99")
    return accepted(model, histories, *sizes)


def is_stopped_at_work(process: WorkerProcess) -> bool:
    """Stop a worker; let it continue if it runs nothing at that moment."""
    chaos_tasks.work.enqueue(0.2)
    pid = process.process.pid
    process.send(signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    running = Task.objects.filter(status="RUNNING", worker=Worker.objects.get(pid=pid).pk).values("pk")
    if Run.objects.filter(task__in=running, ended_at=None).exists():
        return True
    process.send(signal.SIGCONT)
    return False


@pytest.mark.django_db(transaction=True)
def test_the_histories_of_real_workers_are_runs_of_the_models(worker_process, eventually):
    """Three workers; one is killed and one is frozen while they run tasks, and the frozen one comes back."""
    with recording():
        killed, frozen, _other = [worker_process("--threads", "2") for _ in range(3)]
        with transaction.atomic():
            for number in range(8):
                chaos_tasks.work.enqueue(0.05)
                chaos_tasks.work_atomically.enqueue(0.05)
                chaos_tasks.work_alone.enqueue(str(number % KEYS), 0.05)
        for number in range(KEYS):
            chaos_tasks.work_alone.enqueue(str(number), 0.05)
        for victim in (frozen, killed):
            eventually(partial(is_stopped_at_work, victim), why="the worker was never stopped while it ran a task")
        killed.send(signal.SIGKILL)
        eventually(lambda: not Task.objects.filter(finished_at=None).exists(), why="some task was lost")
        frozen.send(signal.SIGCONT)
        frozen.end()
        rows = versions()

    claims, keys = sorted(claims_of(rows)), sorted(keys_of(rows))
    assert sum(any(event.kind == "RESCUE" for event in history) for history in claims) > 0, "nothing was taken back"
    assert all(any(event.kind == "ADMIT" for event in history) for history in keys)
    assert [claims[place] for place, is_one in enumerate(are_runs("fence", claims)) if not is_one] == []
    assert [keys[place] for place, is_one in enumerate(are_runs("keys", keys)) if not is_one] == []


#: Takes the lease, writes to a service with its token for each line that it reads, and releases the lease.
HOLDER = """
import sys
import django
django.setup()
from django_pglock import Lease, LockLost
from tests.sample.models import Effect

number = int(sys.argv[1])
try:
    with Lease("model", ttl=2, timeout=None, owner=str(number)) as lease:
        for line in sys.stdin:
            Effect.objects.filter(name="model", number__lte=lease.token).update(number=lease.token, pid=number)
            print("has written", flush=True)
except LockLost:
    pass
"""


@contextmanager
def holder(number: int) -> Iterator[subprocess.Popen[str]]:
    """Start a process that takes the lease."""
    server, _, _ = os.environ["DATABASE_URL"].rpartition("/")
    settings = {"DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONPATH": str(ROOT)}
    process = start(
        [sys.executable, "-c", HOLDER, str(number)],
        env={**os.environ, **settings, "DATABASE_URL": f"{server}/{connection.settings_dict['NAME']}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def write(process: subprocess.Popen[str]) -> None:
    """Let a process write to the service."""
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "has written\n"


@pytest.mark.django_db(transaction=True)
def test_the_history_of_a_lease_is_a_run_of_the_model(eventually):
    """One holder is frozen and writes too late, and one is killed."""
    Effect.objects.create(name="model")

    def has_taken(number: int) -> None:
        eventually(lambda: LeaseRow.objects.filter(owner=str(number)).exists(), why="the lease was never free")

    with recording(), holder(0) as frozen:
        has_taken(0)
        write(frozen)
        frozen.send_signal(signal.SIGSTOP)
        with holder(1) as killed:
            has_taken(1)
            write(killed)
        frozen.send_signal(signal.SIGCONT)
        write(frozen)
        with Lease("model", ttl=300, timeout=NEVER, owner="2"):
            pass
        history = lease_history()

    assert {"TAKE", "EXPIRED", "WROTE", "RELEASED"} <= {event.kind for event in history}
    assert Event("TAKE", 2, 3) in history
    assert are_runs("leases", [history]) == [True], history


CLAIM, BEGIN, END, FINISH = (Event(kind, 0, 1) for kind in ("CLAIM", "BEGIN", "END", "FINISH"))
ELSEWHERE = tuple(Event(kind, 1, 2) for kind in ("CLAIM", "BEGIN", "END", "FINISH"))
RESCUE = Event("RESCUE", 0, 1)
POSSIBLE_CLAIMS = {
    "an attempt": (CLAIM, BEGIN, END, FINISH),
    "a zombie comes back": (CLAIM, BEGIN, RESCUE, *ELSEWHERE, END),
    "a death before the function begins": (CLAIM, RESCUE, *ELSEWHERE),
}
FORGED_CLAIMS = {
    "two claims without a rescue between": (CLAIM, BEGIN, *ELSEWHERE),
    "the outcome of a zombie": (CLAIM, BEGIN, RESCUE, ELSEWHERE[0], END, FINISH),
    "an attempt that was not counted": (CLAIM, RESCUE, Event("CLAIM", 1, 1)),
    "two outcomes": (CLAIM, BEGIN, END, FINISH, FINISH),
    "an outcome of a function that did not run": (CLAIM, FINISH),
    "a rescue from a worker that has no claim": (CLAIM, Event("RESCUE", 1, 1)),
}


def of_key(*events: tuple[str, int]) -> History:
    return tuple(Event(*event) for event in (("ENQUEUE_READY", 0), ("ENQUEUE", 1), ("CLAIM", 0), *events))


POSSIBLE_KEYS = {
    "one after the other": of_key(("FINISH", 0), ("ADMIT", 1), ("CLAIM", 1)),
    "a rescued task goes first": of_key(("RESCUE", 0), ("ADMIT", 0), ("CLAIM", 0)),
}
FORGED_KEYS = {
    "two at once": of_key(("ADMIT", 1)),
    "a rescued task is overtaken": of_key(("RESCUE", 0), ("ADMIT", 1)),
    "a task that will be retried is overtaken": of_key(("AGAIN", 0), ("ADMIT", 1)),
    "a claim without admission": of_key(("FINISH", 0), ("CLAIM", 1)),
    "ready beside another task": of_key(("ENQUEUE_READY", 2)),
}


def of_lease(*events: tuple[str, int, int]) -> History:
    return tuple(Event(*event) for event in (("TAKE", 0, 1), ("WROTE", 0, 1), *events))


POSSIBLE_LEASES = {
    "one after the other": of_lease(("RENEWED", 0, 1), ("RELEASED", 0, 1), ("TAKE", 1, 2)),
    "the next one takes what has expired": of_lease(("EXPIRED", 0, 1), ("TAKE", 1, 2), ("WROTE", 1, 2)),
    "a late write before the next one has written": of_lease(("EXPIRED", 0, 1), ("TAKE", 1, 2), ("WROTE", 0, 1)),
}
FORGED_LEASES = {
    "two at once": of_lease(("TAKE", 1, 2)),
    "a renewal by another holder": of_lease(("RENEWED", 1, 1)),
    "a renewal of what has expired": of_lease(("EXPIRED", 0, 1), ("RENEWED", 0, 1)),
    "a release of what another one has": of_lease(("EXPIRED", 0, 1), ("TAKE", 1, 2), ("RELEASED", 0, 1)),
    "the same token again": of_lease(("RELEASED", 0, 1), ("TAKE", 1, 1)),
    "a late write that is accepted": of_lease(("EXPIRED", 0, 1), ("TAKE", 1, 2), ("WROTE", 1, 2), ("WROTE", 0, 1)),
}


@pytest.mark.parametrize(
    ("model", "possible", "forged"),
    [
        ("fence", POSSIBLE_CLAIMS, FORGED_CLAIMS),
        ("keys", POSSIBLE_KEYS, FORGED_KEYS),
        ("leases", POSSIBLE_LEASES, FORGED_LEASES),
    ],
)
def test_a_forged_history_of_workers_is_no_run_of_the_model(model, possible, forged):
    histories = {**possible, **forged}
    found = are_runs(model, list(histories.values()))
    assert {name for name, is_one in zip(histories, found, strict=True) if is_one} == set(possible)
