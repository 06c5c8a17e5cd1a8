"""Faults of tasks: functions that harm the process in which they run, and functions that do not end in time."""

from __future__ import annotations

import pytest

from django_pglock.models import Attempt, Task
from tests.sample import hostile_tasks
from tests.sample import running_tasks as running

#: Quick heartbeats, so that many faults do not take long.
QUICK = {"HEARTBEAT_INTERVAL": 0.8, "POLL_INTERVAL": 2.0}
#: The ways of the short form: those that keep their process, that spoil it, and that end it.
FEW = ("break_logging", "leave_threads", "replace_signal_handlers", "close_all_files", "become_another_program")


@pytest.mark.short
@pytest.mark.fault("tasks spoil their process: files, signals, threads, forks, memory, log; or end it")
def test_tasks_that_harm_their_process(experiment, eventually, is_short):
    """Each way beside other tasks, which run in the same process, or again in the next one."""
    for way in FEW if is_short else hostile_tasks.WAYS:
        worker = experiment.worker("--threads", "3", pglock=QUICK)
        harm = hostile_tasks.do.enqueue(way)
        experiment.load(3, seconds=0.1)
        eventually(experiment.is_over, why=f"some task is stuck after {way}")
        Task.objects.filter(pk=harm.id).delete()
        worker.end()
    experiment.judge()


@pytest.mark.short
@pytest.mark.fault("functions outlast their timeouts: in C, in sleeps, in the log, in loops that swallow every error")
def test_functions_that_do_not_end_in_time(experiment, eventually):
    experiment.workers(2, "--threads", "3", "--grace", "2", pglock=QUICK)
    late = [
        running.swallow.enqueue("write_by_cursor"),
        running.swallow_in_coroutine.enqueue(),
        running.keep_gil.using(timeout=0.3).enqueue(3),
        running.sleep_in_c.using(timeout=0.3).enqueue(600),
        running.overrun_in_coroutine.enqueue(),
        *[running.log_for.enqueue(0.6) for _ in range(5)],
    ]
    experiment.load(10, seconds=0.2)
    eventually(experiment.is_over, why="some task is stuck")
    rows = Task.objects.filter(pk__in=[each.id for each in late])
    ends = set(rows.values_list("status", flat=True))
    reasons = set(Attempt.objects.filter(task__in=rows, outcome="FAILED").values_list("exception_path", flat=True))
    rows.delete()
    experiment.judge()
    is_kept = (ends, reasons) == ({"FAILED"}, {"django_pglock.errors.TaskTimeout"})
    experiment.affirm("each of them ends FAILED by its timeout", is_kept=is_kept)
