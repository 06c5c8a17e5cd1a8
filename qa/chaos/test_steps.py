"""Faults at each statement of a task of ten steps, of its children, and of what the worker writes for them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from zlib import crc32

import pytest
from django.db import connection

from django_pglock.models import Attempt, Step, Task
from qa.chaos.statements import Counted, Held, Place, StatementProxy
from qa.processes import children_of, lives
from tests.pgbouncer import PROGRAM, PgBouncer, way_to_server
from tests.sample.chaos_tasks import ATOMIC, CHILDREN, PARTS, PLAIN, ROWS, import_rows, ten_steps
from tests.sample.models import Effect, Letter

#: The tasks of one run: that of ten steps, the one that emits its event, and its children.
TASKS = 2 + len(CHILDREN)
#: Runs without a fault, after which a worker has sent each statement that it sends once a session.
WARM_UP, CLEAN = 2, 3
#: A place at which a run does not arrive, because another worker was faster, is tried again so often.
TRIES = 5


class Runs:
    """Two workers, each behind a proxy of its own, that run one task of ten steps after the other."""

    def __init__(self, experiment, proxies, counted, eventually) -> None:
        self.experiment, self.counted, self.eventually = experiment, counted, eventually
        settings = {"pglock": {"HEARTBEAT_INTERVAL": 0.4, "POLL_INTERVAL": 1.0}}
        self.workers = {
            each: experiment.worker("--threads", "2", url=each.url("postgres"), **settings) for each in proxies
        }
        self.struck: list[int] = []
        for text in ROWS:
            Letter.objects.get_or_create(text=text)

    def run(self, held: Held | None = None, strike=None) -> bool:
        """Run one task. Strike at a place if there is one; return whether the run has come to it."""
        self._replace_struck()
        self.counted.begin(held)
        task = int(ten_steps.enqueue().id)
        if held is not None:
            self.eventually(lambda: held.is_reached.is_set() or self.experiment.is_over(), why="some task is stuck")
            if held.is_reached.is_set():
                self.struck.append(task)
                strike(self, held)
        self.eventually(self.experiment.is_over, why=f"some task is stuck after {held}")
        return task in self.struck

    def _replace_struck(self) -> None:
        """A worker whose children die again and again waits ever longer before it starts the next one."""
        for proxy, worker in self.workers.items():
            if len(worker.children) > 1 or not lives(worker.child):
                worker.end()
                self.workers[proxy] = worker.start_replacement()

    def places(self, *, is_answer: bool) -> list[Place]:
        """Return the statements that each run has, in the order in which they begin."""
        seen = []
        for number in range(WARM_UP + CLEAN):
            self.run()
            seen += [self.counted.seen] * (number >= WARM_UP)
        texts = [text for text in seen[0] if is_answer or text not in self.counted.claims]
        return [Place(text, number + 1) for text in texts for number in range(min(each[text] for each in seen))]


def kill(runs: Runs, held: Held) -> None:
    victim = runs.workers[held.proxy].child
    os.kill(victim, signal.SIGKILL)
    runs.eventually(lambda: not lives(victim))


def kill_after(runs: Runs, held: Held) -> None:
    """The server has executed the statement."""
    kill(runs, held)
    held.release(is_passed_on=False)


def kill_with_statement_in_transit(runs: Runs, held: Held) -> None:
    """The server gets the statement when the worker is dead, and another one has taken the task over."""
    kill(runs, held)
    wait_until_over(runs)
    held.send_late()
    held.release(is_passed_on=False)


def wait_until_over(runs: Runs, seconds: float = 8.0) -> None:
    """Others continue, unless a transaction that is still open at the server has locked their rows."""
    until = time.monotonic() + seconds
    while not runs.experiment.is_over() and not is_locked() and time.monotonic() < until:
        time.sleep(0.02)


def is_locked() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return bool(cursor.fetchone()[0])


def cut(runs: Runs, held: Held) -> None:
    held.link.reset()
    held.release(is_passed_on=False)


def freeze(runs: Runs, held: Held) -> None:
    """Others take its tasks over. Then it continues, and with it the statement."""
    parent = runs.workers[held.proxy].process.pid
    [starter] = children_of(parent)
    family = [parent, starter, *children_of(starter)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    wait_until_over(runs)
    # Its parent would kill the child because it was frozen.
    for pid in reversed(family):
        os.kill(pid, signal.SIGCONT)
        held.release(is_passed_on=True)
        held.is_answered.wait(1)


KEPT = (
    "atomic effects once, in order; of the others at most the one in progress again; "
    "nothing left suspended, no child twice"
)
#: What is done, and whether it is at the answer instead of the statement.
FAULTS = {
    "SIGKILL behind each statement": (kill_after, True),
    "SIGKILL, and the statement arrives afterwards": (kill_with_statement_in_transit, False),
    "the connection is cut before each statement": (cut, False),
    "the connection is cut behind each statement": (cut, True),
    "SIGSTOP before each statement, and SIGCONT afterwards": (freeze, False),
}


@contextlib.contextmanager
def ways_to(server, variant) -> Iterator[str]:
    """Yield the folder of the server's socket, or of a pooler's."""
    if variant == "direct":
        yield str(server.folder)
        return
    connection.ensure_connection()
    with PgBouncer({"postgres": f"{way_to_server(connection.connection.info)} pool_size=20"}) as pgbouncer:
        yield str(pgbouncer.folder)


@pytest.fixture
def runs(experiment, server, variant, eventually) -> Iterator[Runs]:
    if variant != "direct" and PROGRAM is None:
        pytest.skip("not shown: no PgBouncer on this machine")
    counted = Counted()
    with (
        ways_to(server, variant) as folder,
        StatementProxy(folder, counted) as first,
        StatementProxy(folder, counted) as second,
    ):
        yield Runs(experiment, [first, second], counted, eventually)
        for worker in experiment.started:
            worker.end()


@pytest.mark.short
@pytest.mark.fault("each statement of a task of ten steps")
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("variant", ["direct", "PgBouncer"])
def test_a_fault_at_each_statement_of_a_task_of_ten_steps(runs, experiment, variant, name, is_short):
    """Each place of the run in the long form, and some in the short form."""
    strike, is_answer = FAULTS[name]
    experiment.fault_name = f"ten steps, {variant}: {name}"
    places = runs.places(is_answer=is_answer)
    if is_short:
        drawn = sorted(places, key=lambda each: crc32(f"{each} {name} {variant}".encode()))
        places = drawn[: 2 if strike is freeze else 5]
    missed = [place for place in places if not any(runs.run(Held(place, is_answer), strike) for _ in range(TRIES))]
    for worker in experiment.started:
        worker.end()
    assert not missed, "no run has come to these statements"
    flaws, repeated = judge(runs.struck)
    print(*flaws, sep="\n")
    counts = f"{len(runs.struck)} faults at {len(places)} statements; other effects repeated: {repeated}"
    experiment.affirm(f"{KEPT}. {counts}", is_kept=not flaws)


def judge(struck: list[int]) -> tuple[list[str], int]:
    """Return what is wrong, and how many effects of other than atomic steps were repeated."""
    flaws, repeated = [], 0
    everything = list(Task.objects.order_by("pk"))
    parents = [each for each in everything if each.task_path.endswith("ten_steps")]
    if len(everything) != TASKS * len(parents):
        flaws.append(f"{len(everything)} tasks for {len(parents)} parents")
    flaws += [f"{each.pk} is {each.status}" for each in everything if each.status != "SUCCESSFUL"]
    for each in parents:
        effects = list(Effect.objects.filter(number__range=(each.pk * 1000, each.pk * 1000 + 999)).order_by("pk"))
        found, wrong = judge_effects(each, effects)
        if found and each.pk not in struck:
            wrong.append(f"{found} effects were repeated without a fault")
        flaws += [f"{each.pk}: {what}" for what in wrong]
        repeated += found
    return flaws, repeated


def judge_effects(parent: Task, effects: list[Effect]) -> tuple[int, list[str]]:
    base = parent.pk * 1000
    counts = Counter(each.number - base for each in effects)
    wrong = []
    if set(counts) != {*PARTS, *CHILDREN}:
        wrong.append(f"it has the effects {counts}")
    if twice := [part for part, kind in PARTS.items() if kind == ATOMIC and counts[part] > 1]:
        wrong.append(f"the atomic parts {twice} have several effects")
    if sum(counts[part] - 1 for part, kind in PARTS.items() if kind == PLAIN) > 1 or max(counts.values()) > 2:
        wrong.append(f"more than the part in progress was repeated: {counts}")
    first = list(dict.fromkeys(each.number - base for each in effects if each.name in (ATOMIC, PLAIN)))
    if first != list(PARTS):
        wrong.append(f"its order is {first}")
    results = [base + part for part in sorted({*PARTS, *CHILDREN} - {31, 32, 33})]
    if parent.result != results:
        wrong.append(f"its result is {parent.result}")
    numbers = list(Step.objects.filter(task=parent).order_by("number").values_list("number", "finished_at"))
    if [number for number, _ in numbers] != list(range(1, 11)):
        wrong.append(f"its steps have the numbers {numbers}")
    wrong += [f"attempt {each!r}" for each in Attempt.objects.filter(task=parent)[1:]]
    return sum(counts.values()) - len(counts), wrong


@pytest.mark.parametrize("count", [pytest.param(5_000, marks=pytest.mark.short), 100_000])
@pytest.mark.fault("deploys during an import")
def test_a_deploy_every_second_during_an_import(experiment, eventually, count):
    experiment.fault_name = f"a deploy every second while a task imports {count:,} rows by chunks"
    Letter.objects.all().delete()
    Letter.objects.bulk_create(Letter(text="row") for _ in range(count))
    imported = Effect.objects.filter(name="imported")
    imported.delete()
    worker, deploys = experiment.worker(), 0
    task = import_rows.enqueue()
    eventually(imported.exists, why="the import does not begin")
    while not experiment.is_over():
        old, worker = worker, experiment.worker()
        experiment.send_signal(old, signal.SIGTERM)
        assert old.wait() == 0
        deploys += 1
        time.sleep(1)
    numbers = list(imported.values_list("number", flat=True))
    Letter.objects.all().delete()
    row = Task.objects.get(pk=task.id)
    assert row.attempts > 1, "no deploy has met the import"
    is_kept = len(numbers) == len(set(numbers)) == count and row.status == "SUCCESSFUL"
    experiment.affirm(f"each row once; {row.attempts} runs by {deploys} deploys", is_kept=is_kept)
    experiment.affirm("no attempt is spent", is_kept=row.attempts_made == 1 and not Attempt.objects.exists())
