"""The judge of qa/chaos, on rows that are made up: each verdict can be reached, and is not reached without cause."""

from __future__ import annotations

import math
from contextlib import nullcontext
from uuid import UUID

import pytest

from qa.chaos.evidence import (
    EFFECT_TWICE,
    FAILED,
    KEY_AT_ONCE,
    LOST,
    STUCK,
    TWICE_AT_ONCE,
    ZOMBIE,
    Absence,
    Evidence,
    RunRow,
    TaskRow,
)
from qa.chaos.experiment import Experiment

ONE, OTHER = UUID(int=1), UUID(int=2)


def run(task=1, attempt=1, worker=ONE, started=0.0, ended=1.0, **more):
    return RunRow(task, attempt, worker, started, ended, **more)


def done(task=1, attempts=1, **more):
    return TaskRow(task, "SUCCESSFUL", attempts, attempts, **more)


def verdicts(tasks, runs, absences=(), **exceptions):
    evidence = Evidence({task.id for task in tasks}, tasks, runs, absences)
    return {finding.verdict for finding in evidence.findings(**exceptions)}


def test_runs_without_faults_get_no_verdict():
    rescued = [run(2, 1, ended=None), run(2, 2, OTHER, started=5.0, ended=6.0)]
    atomic = run(3, is_atomic=True)
    assert verdicts([done(), done(2, 2), done(3)], [run(), *rescued, atomic], [Absence(ONE, 4.0)]) == set()


def test_a_missing_or_never_ended_task_counts_as_lost():
    assert {each.verdict for each in Evidence({1}, [], []).findings()} == {LOST}
    assert verdicts([done()], []) == {LOST}
    assert verdicts([done()], [run(ended=None)]) == {LOST}


@pytest.mark.parametrize("status", ["READY", "BLOCKED", "RUNNING", "SCHEDULED"])
def test_an_unfinished_task_counts_as_stuck(status):
    row = TaskRow(1, status, 1)
    assert verdicts([row], []) == {STUCK}
    assert verdicts([row], [], may_wait={1}) == set()


@pytest.mark.parametrize("status", ["FAILED", "CANCELLED"])
def test_failed_without_a_fault_of_its_own(status):
    row = TaskRow(1, status, 1)
    assert verdicts([row], []) == {FAILED}
    assert verdicts([row], [], may_fail={1}) == set()


def test_overlapping_runs_of_one_task_are_a_violation():
    first, second = run(ended=None), run(1, 2, OTHER, started=5.0, ended=6.0)
    assert verdicts([done(1, 2)], [first, second]) == {TWICE_AT_ONCE}
    assert verdicts([done(1, 2)], [first, second], [Absence(ONE, 5.5)]) == {TWICE_AT_ONCE}
    assert verdicts([done(1, 2)], [first, second], [Absence(UUID(int=3), 4.0)]) == {TWICE_AT_ONCE}
    assert verdicts([done(1, 2)], [first, second], [Absence(ONE, 4.0)]) == set()


@pytest.mark.parametrize(("woken_at", "expected"), [(5.5, {TWICE_AT_ONCE}), (6.5, set())])
def test_a_frozen_worker_runs_on_when_it_is_woken(woken_at, expected):
    runs = [run(ended=8.0), run(1, 2, OTHER, started=5.0, ended=6.0)]
    assert verdicts([done(1, 2)], runs, [Absence(ONE, 1.0, woken_at)]) == expected


@pytest.mark.parametrize(("started", "expected"), [(0.5, set()), (1.001, set()), (8.5, {KEY_AT_ONCE})])
def test_a_run_on_a_cut_off_worker_counts_as_ended_at_the_cut(started, expected):
    """The message about its begin may be sent before the cut, and the message about its end arrives after it."""
    runs = [run(1, started=started, ended=9.0, key="a"), run(2, worker=OTHER, started=8.8, ended=10.0, key="a")]
    assert verdicts([done(1), done(2)], runs, [Absence(ONE, 1.0, 8.0, is_cut_off=True)]) == expected


def test_overlapping_runs_of_one_lock_key_are_a_violation():
    runs = [run(1, key="a"), run(2, worker=OTHER, started=0.5, ended=2.0, key="a"), run(3, key="b")]
    assert verdicts([done(1), done(2), done(3)], runs) == {KEY_AT_ONCE}
    assert verdicts([done(1), done(2), done(3)], runs, [Absence(ONE, 0.2)]) == set()


def test_a_double_effect_or_an_effect_of_a_failed_task_is_a_violation():
    once, again = run(is_atomic=True), run(1, 2, OTHER, started=5.0, ended=6.0, is_atomic=True)
    assert verdicts([done(1, 2)], [once, again]) == {EFFECT_TWICE}
    assert verdicts([TaskRow(1, "FAILED", 1)], [once], may_fail={1}) == {EFFECT_TWICE}


def test_a_result_of_a_replaced_run_is_a_violation():
    runs = [run(), run(1, 2, OTHER, started=5.0, ended=6.0)]
    assert verdicts([TaskRow(1, "SUCCESSFUL", 2, result=1)], runs) == {ZOMBIE}


def test_the_recovery_time_is_counted_from_the_fault_to_runs_on_other_workers():
    runs = [
        run(1, ended=None),
        run(2, ended=None),
        run(1, 2, ONE, started=11.0, ended=12.0),
        run(1, 2, OTHER, started=13.0, ended=14.0),
        run(2, 2, OTHER, started=15.0, ended=16.0),
        run(3, 1, OTHER, started=9.0, ended=10.5),
    ]
    recovery = Evidence((), (), runs).recovery({1, 2}, ONE, since=10.0)
    assert (recovery.first, recovery.last, recovery.others) == (3.0, 5.0, 0.5)
    assert Evidence((), (), runs[:3]).recovery({1, 2}, ONE, since=10.0).first == math.inf


def test_recovery_ignores_tasks_that_the_victim_had_finished():
    runs = [run(1), run(2, ended=None), run(2, 2, OTHER, started=13.0, ended=14.0)]
    recovery = Evidence({1, 2}, [done(1), done(2, 2)], runs).recovery({1, 2}, ONE, since=10.0)
    assert (recovery.first, recovery.last) == (3.0, 3.0)


def test_evidence_about_a_victim_without_tasks_is_refused():
    with pytest.raises(AssertionError, match="nothing is shown"):
        Evidence({1}, [done(1)], [run(1)]).recovery({1}, ONE, since=10.0)
    with pytest.raises(AssertionError, match="nothing is shown"):
        Evidence({1}, [done(1)], [run(1)]).recovery((), ONE, since=10.0)


@pytest.mark.parametrize(
    ("is_short", "measured", "is_kept"),
    [(False, 10.0, True), (False, 10.1, False), (True, 99.0, True), (True, 101.0, False)],
)
def test_a_measured_time_beyond_its_bound_fails(is_short, measured, is_kept):
    """In the short form, which may run on a slow machine, only an event that never happens is too late."""
    experiment = Experiment(None, "a fault", rows := [], is_short=is_short)
    with nullcontext() if is_kept else pytest.raises(AssertionError, match="it is done: after"):
        experiment.show("it is done", measured, bound=10)
    assert [row.is_kept for row in rows] == [is_kept]
