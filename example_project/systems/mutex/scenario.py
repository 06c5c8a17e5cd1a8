"""The scenario of mutex: an owner and another client, a holder that freezes, and 64 clients 32 of which are killed."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from django.db import connection
from django.db.models import Q

from example_project.systems.harness import Harness
from example_project.systems.mutex.models import FREE, Status, TaskState

PROCESSES, THREADS = 4, 16
QUEUES = ("mail", "images", "reports", "billing")
ROWS, POISONED, RETRIES = 400, 4, 20
#: How long a client may hold a row.
TIMEOUT = timedelta(seconds=2)
LONGEST = 240.0

#: A trigger writes down each change of a row. The rows that the clients were given are written down by the clients.
WITNESS = """
DROP TABLE IF EXISTS task_state_log, task_state_given;
CREATE TABLE task_state_given (task bigint, token bigint, owner text);
CREATE TABLE task_state_log (task bigint, old_status text, new_status text, was_over boolean);
CREATE OR REPLACE FUNCTION task_state_write_log() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO task_state_log VALUES (NEW.id, OLD.status, NEW.status, OLD.expires_at <= clock_timestamp());
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER task_state_log AFTER UPDATE ON task_state
    FOR EACH ROW EXECUTE FUNCTION task_state_write_log();
"""
NO_WITNESS = """
DROP TRIGGER task_state_log ON task_state;
DROP FUNCTION task_state_write_log();
DROP TABLE task_state_log, task_state_given;
"""


def run_scenario(harness: Harness) -> None:
    """Run the system."""
    run(WITNESS)
    try:
        an_owner(harness)
        a_frozen_holder(harness)
        evidence(harness, killed_clients(harness))
    finally:
        run(NO_WITNESS)


def an_owner(harness: Harness) -> None:
    """One acquires, another cannot, and a name is a name in its queue only."""
    for queue in QUEUES[:2]:
        TaskState.objects.create(queue=queue, name="index")
    ours = TaskState.objects.acquire("mail", "index", "anna")
    assert ours is not None
    harness.say("Anna acquires 'index' of the queue mail, without a timeout.")
    same, other = (TaskState.objects.acquire(queue, "index", "bert") for queue in QUEUES[:2])
    harness.say(f"  Bert tries the same: {answer(same)}. He tries 'index' of the queue images: {answer(other)}.")
    harness.say(f"  Anna releases hers: {ours.release()}. She releases it once more: {ours.release()}.")


def a_frozen_holder(harness: Harness) -> None:
    """A holder is stopped for longer than its timeout, and then continues as before."""
    daily = TaskState.objects.create(queue="reports", name="daily")
    holder = harness.call(hold, "reports", "daily", 1.0)
    wait_until(lambda: TaskState.objects.filter(pk=daily.pk, status=Status.IN_PROGRESS).exists(), holder)
    holder.send_signal(signal.SIGSTOP)
    harness.say("Carla's process acquires 'daily' for one second, and freezes.")
    refused = TaskState.objects.acquire("reports", "daily", "bert")
    began = time.monotonic()
    wait_until(lambda: refused or TaskState.objects.acquire("reports", "daily", "bert"))
    seconds = time.monotonic() - began
    holder.send_signal(signal.SIGCONT)
    released = holder.wait(LONGEST) != 0
    harness.say(f"  Bert tries it: {answer(refused)}. {seconds:.1f} s later her time is over: acquired.")
    harness.say(f"  Carla's process continues, and releases what was hers: {released}.")


def killed_clients(harness: Harness) -> list[int]:
    """Many clients share the rows of four queues. Half of them are killed while they have rows in progress.

    Return the rows that the killed clients left in progress.
    """
    left: list[int] = []
    TaskState.objects.bulk_create(
        TaskState(queue=QUEUES[number % 4], name=f"row {number}", retries_left=RETRIES) for number in range(ROWS)
    )
    TaskState.objects.bulk_create(
        TaskState(queue=QUEUES[number], name="poison", retries_left=3) for number in range(POISONED)
    )
    harness.say(f"{PROCESSES * THREADS} clients in {PROCESSES} processes capture {ROWS} rows of {len(QUEUES)} queues.")
    processes = [start(harness, number) for number in range(PROCESSES)]
    for number in (0, 1):
        wait_until(lambda number=number: done() > ROWS * (number + 1) / 5, *processes)
        rows = kill_with_rows(processes[number], number)
        left += rows
        found = f"{done():3} rows are done. A process is killed by SIGKILL. It leaves {len(rows)} rows in progress."
        harness.say(f"  {found}")
        processes[number] = start(harness, PROCESSES + number)
    for process in processes:
        if process.wait(LONGEST):
            raise RuntimeError(f"A client ended with {process.returncode}:\n{harness.fleet.output()}")
    harness.say(f"  {done():3} rows are done. What the killed processes held was captured again after its timeout.")
    harness.say(f"  {POISONED} rows fail each time. They had three retries, and are not tried again.")
    return left


def hold(queue: str, name: str, seconds: float) -> None:
    """Acquire a row, work for too long, and release it. Exit with 1 if that was still possible."""
    row = TaskState.objects.acquire(queue, name, "carla", timedelta(seconds=seconds))
    assert row is not None
    # Wait until another client has the row, so that this holder cannot continue before it was stopped.
    wait_until(lambda: TaskState.objects.get(pk=row.pk).owner != "carla")
    raise SystemExit(int(row.release()))


def work(process: int, threads: int) -> None:
    """Capture rows and work on them, in several threads, until none is left."""
    clients = [threading.Thread(target=client, args=(f"process {process} client {n}",)) for n in range(threads)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()


def client(owner: str) -> None:
    """Work on rows, three at a time, until each is done or has no retries left."""
    counted = TaskState.objects.filter(retries_left__isnull=False)
    unfinished = counted.filter(Q(status=Status.IN_PROGRESS) | Q(status__in=FREE, retries_left__gt=0))
    try:
        while unfinished.exists():
            rows = counted.filter(queue=random.choice(QUEUES)).capture(owner, 3, TIMEOUT)
            run("INSERT INTO task_state_given VALUES (%s, %s, %s)", *((row.pk, row.token, owner) for row in rows))
            for row in rows:
                time.sleep(random.uniform(0.02, 0.06))
                is_unlucky = row.name == "poison" or (row.token == 1 and row.pk % 10 == 0)
                row.release(Status.FAILED if is_unlucky else Status.DONE)
            if not rows:
                time.sleep(random.uniform(0.3, 0.6))
    finally:
        connection.close()


def start(harness: Harness, number: int) -> subprocess.Popen[bytes]:
    """Start a process of clients, whose sessions have its name."""
    return harness.call(work, number, THREADS, PGAPPNAME=f"process {number}")


def kill_with_rows(process: subprocess.Popen[bytes], number: int) -> list[int]:
    """Kill a process at a moment at which it holds rows. Return those that it has left in progress."""
    rows = TaskState.objects.filter(status=Status.IN_PROGRESS, owner__startswith=f"process {number} ")
    while process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        if rows.exists():
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    process.kill()
    process.wait()
    # The server may still release a row: the process had asked for it.
    wait_until(lambda: not has_session(f"process {number}"))
    return list(rows.values_list("pk", flat=True))


def has_session(name: str) -> bool:
    """Return whether some session has this name."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name = %s", [name])
        return bool(cursor.fetchone()[0])


def evidence(harness: Harness, left: list[int]) -> None:
    """Ask the database, also about the rows that killed processes left in progress."""
    harness.claim(
        "No row had two holders: each was free when it was taken",
        """SELECT count(*) FROM task_state_log
           WHERE new_status = 'in_progress' AND old_status IN ('in_progress', 'done')""",
    )
    harness.claim(
        "No row was given to two clients at once",
        "SELECT count(*) FROM (SELECT FROM task_state_given GROUP BY task, token HAVING count(*) > 1) AS twice",
    )
    harness.claim(
        "No row was taken from its holder before its time was over",
        "SELECT count(*) FROM task_state_log WHERE new_status = 'expired' AND was_over IS NOT TRUE",
    )
    harness.claim(
        "Killed processes left rows behind, and their time ended",
        """SELECT count(*) FROM unnest(%s::bigint[]) AS task_left (id)
           WHERE NOT EXISTS (SELECT FROM task_state_log WHERE task = task_left.id AND new_status = 'expired')""",
        left,
    )
    harness.claim(
        "No row is lost: each is done, once",
        """SELECT count(*) FROM task_state WHERE name LIKE 'row %%' AND (status <> 'done' OR 1 <>
           (SELECT count(*) FROM task_state_log WHERE task = task_state.id AND new_status = 'done'))""",
    )
    harness.claim(
        "No retry was spent twice: each taking cost one",
        f"""SELECT count(*) FROM task_state WHERE retries_left <>
            CASE WHEN name = 'poison' THEN 3 ELSE {RETRIES} END
            - (SELECT count(*) FROM task_state_log WHERE task = task_state.id AND new_status = 'in_progress')""",
    )
    harness.claim(
        "Rows that always fail were taken three times and no more",
        "SELECT count(*) FROM task_state WHERE name = 'poison' AND (status NOT IN ('failed', 'expired') OR token <> 3)",
    )
    harness.claim(
        "A late release has no effect: the row belongs to its next owner",
        "SELECT count(*) FROM task_state WHERE name = 'daily' AND owner IS DISTINCT FROM 'bert'",
    )


def done() -> int:
    """Return how many rows are done."""
    return TaskState.objects.filter(status=Status.DONE).count()


def answer(row: TaskState | None) -> str:
    """Return what to say of an attempt to acquire."""
    return "acquired" if row else "somebody has it"


def wait_until(is_true: Callable[[], object], *processes: subprocess.Popen[bytes]) -> None:
    """Wait until something is true. Raises ``RuntimeError`` if that never comes, or if a process has failed."""
    deadline = time.monotonic() + LONGEST
    while not is_true():
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            raise RuntimeError("A client has failed, or what it should do did not happen.")
        time.sleep(0.05)


def run(statement: str, *rows: tuple[object, ...]) -> None:
    """Run a statement, once for each of the rows if it has parameters."""
    with connection.cursor() as cursor:
        if "%s" in statement:
            cursor.executemany(statement, rows)
        else:
            cursor.execute(statement)
