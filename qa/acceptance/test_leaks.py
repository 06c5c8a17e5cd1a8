"""A worker that has run twenty thousand tasks uses no more memory, files and sessions than after the first tasks."""

from __future__ import annotations

import os

import pytest

from django_pglock import enqueue_many
from django_pglock.models import Task, Worker
from qa.processes import parent_of, sessions
from tests.sample import running_tasks, tasks
from tests.sql import execute_sql

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.acceptance,
    pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="there is no /proc"),
]

#: Tasks of a round, rounds until all caches are full, and rounds in which nothing may grow.
TASKS, WARM_UP, ROUNDS = 4000, 3, 4
#: How many of the tasks of a round do something; the others do nothing. Arguments from the number of the call.
KINDS = {
    tasks.echo: (400, lambda number: {"value": f"value {number}"}),
    tasks.sleep_async: (300, lambda number: {"seconds": 0}),
    tasks.record_atomically: (200, lambda number: {"name": f"name {number}", "number": number}),
    tasks.fail: (100, lambda number: {"text": f"text {number}"}),
    tasks.fail_with_function: (100, lambda number: {}),
    tasks.alone: (20, lambda number: {"name": f"name {number}"}),
    running_tasks.locked: (200, lambda number: {"key": number // 2}),
    running_tasks.tell: (50, lambda number: {"count": 3}),
}
#: What may be added in the last rounds for each task. A leak of one object in five tasks is seen, and one of 200 bytes
#: a task outside of Python's objects; without any, less than half of this is measured, from caches and allocators.
MOST_OBJECTS, MOST_BYTES = 0.2, 220


@pytest.fixture
def finish(eventually):
    unfinished = Task.objects.exclude(status__in=("SUCCESSFUL", "FAILED"))
    return lambda: eventually(lambda: not unfinished.exists(), why="tasks are left")


def enqueue(tasks_, first):
    for function, (share, arguments) in KINDS.items():
        enqueue_many(function, [arguments(first + number) for number in range(share * tasks_ // TASKS)])
    others = TASKS - sum(share for share, _ in KINDS.values())
    enqueue_many(tasks.nothing, range(others * tasks_ // TASKS))


def things_of(pids):
    """Return how many threads, file descriptors and sessions a worker has: its parent, its starter and its child.

    Without the session of the upkeep, which the parent has for a moment every few seconds.
    """
    names = [name for name, _ in sessions()]
    upkeep = names.count("lockworker upkeep")
    files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    return sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids), files - upkeep, len(names) - upkeep


def test_memory_files_and_sessions_of_a_worker_do_not_grow(worker_process, finish, eventually):
    """Some sessions are ended in the middle of the test."""
    # One arena for all threads: how memory is spread over several is chance. And nothing that measures coverage.
    variables = {"MALLOC_ARENA_MAX": "1", "COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}
    process = worker_process("--threads", "2", **variables)
    child = Worker.objects.get().pid
    pids = [process.process.pid, parent_of(child), child]

    def weigh():
        result = running_tasks.weigh.enqueue()
        finish()
        result.refresh()
        return result.return_value

    for key in ("one", "other"):  # each thread has a session from here on
        running_tasks.locked.enqueue(key, 0.2)
    enqueue(100, 0)
    finish()
    things = eventually(lambda: (found := things_of(pids)) == things_of(pids) and found)
    for round_ in range(1, WARM_UP + ROUNDS + 1):
        enqueue(TASKS, round_ * TASKS)
        execute_sql("SELECT pg_terminate_backend(pid) FROM unnest(%s) AS pid", [[pid for _, pid in sessions()]])
        finish()
        for key in ("one", "other"):
            running_tasks.locked.enqueue(key, 0.1)
        finish()
        eventually(lambda: all(now <= before for now, before in zip(things_of(pids), things, strict=True)))
        if round_ == WARM_UP:
            objects, memory = weigh()
    objects_at_last, memory_at_last = weigh()
    assert (objects_at_last - objects) / (ROUNDS * TASKS) < MOST_OBJECTS
    assert (memory_at_last - memory) / (ROUNDS * TASKS) < MOST_BYTES
