"""What real workers do to real rows is what the models allow; a forged history is not."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

import pytest
from django.db import transaction

from django_pglock.models import Task, Worker
from tests.conftest import WorkerProcess
from tests.model.checker import Model
from tests.model.recorder import Event, History, claims_of, keys_of, promela, recording, versions
from tests.sample import chaos_tasks
from tests.sample.models import Run

KEYS = 4
#: Events that a model allows so often only.
FAULTS = {"RESCUE", "AGAIN", "GIVE_BACK"}


def accepted(model: str, histories: list[History]) -> list[bool]:
    """Say of each history whether it is a run of the model."""
    faults = max(sum(event.kind in FAULTS for event in history) for history in histories)
    # One more, for what no version of a row shows.
    found = Model(model).accepted(promela(model, histories), f"-DFAULTS={faults + 1}", "-DWORKERS=3", "-DTASKS=3")
    return [number in found for number in range(len(histories))]


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
    assert [claims[place] for place, is_one in enumerate(accepted("fence", claims)) if not is_one] == []
    assert [keys[place] for place, is_one in enumerate(accepted("keys", keys)) if not is_one] == []


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


@pytest.mark.parametrize(
    ("model", "possible", "forged"), [("fence", POSSIBLE_CLAIMS, FORGED_CLAIMS), ("keys", POSSIBLE_KEYS, FORGED_KEYS)]
)
def test_a_forged_history_is_refused(model, possible, forged):
    histories = {**possible, **forged}
    found = accepted(model, list(histories.values()))
    assert {name for name, is_one in zip(histories, found, strict=True) if is_one} == set(possible)
