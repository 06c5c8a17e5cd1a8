"""The judge of qa/chaos, on rows that are made up: each verdict can be reached, and is not reached without cause."""

from __future__ import annotations

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

ONE, OTHER = UUID(int=1), UUID(int=2)


def run(task=1, attempt=1, worker=ONE, started=0.0, ended=1.0, **more):
    return RunRow(task, attempt, worker, started, ended, **more)


def again(task=1, started=5.0, **more):
    return run(task, 2, OTHER, started=started, ended=started + 1, **more)


def ended(status, *, task=1, attempts=1):
    return TaskRow(task, status, attempts, attempts)


DONE, DONE_TWICE = ended("SUCCESSFUL"), ended("SUCCESSFUL", attempts=2)
BOTH_OF_A_KEY = [run(key="a"), run(2, worker=OTHER, started=0.5, ended=2.0, key="a")]
#: A message about the begin may be sent before the cut, and the message about the end arrives after it.
CUT = Absence(ONE, 1.0, 8.0, is_cut_off=True)


def cut(started):
    return [run(started=started, ended=9.0, key="a"), run(2, worker=OTHER, started=8.8, ended=10.0, key="a")]


@pytest.mark.parametrize(
    ("tasks", "runs", "absences", "verdict"),
    [
        ([DONE], [run()], [], None),
        ([DONE_TWICE], [run(ended=None), again()], [Absence(ONE, 4.0)], None),
        ([], [], [], LOST),
        ([DONE], [], [], LOST),
        ([DONE], [run(ended=None)], [], LOST),
        ([ended("RUNNING")], [], [], STUCK),
        ([ended("FAILED")], [], [], FAILED),
        ([DONE_TWICE], [run(ended=None), again()], [], TWICE_AT_ONCE),
        ([DONE_TWICE], [run(ended=None), again()], [Absence(ONE, 5.5)], TWICE_AT_ONCE),
        ([DONE_TWICE], [run(ended=8.0), again()], [Absence(ONE, 1.0, 5.5)], TWICE_AT_ONCE),
        ([DONE_TWICE], [run(ended=8.0), again()], [Absence(ONE, 1.0, 6.5)], None),
        ([DONE, ended("SUCCESSFUL", task=2)], BOTH_OF_A_KEY, [], KEY_AT_ONCE),
        ([DONE, ended("SUCCESSFUL", task=2)], BOTH_OF_A_KEY, [Absence(ONE, 0.2)], None),
        ([DONE, ended("SUCCESSFUL", task=2)], cut(1.001), [CUT], None),
        ([DONE, ended("SUCCESSFUL", task=2)], cut(8.5), [CUT], KEY_AT_ONCE),
        ([DONE_TWICE], [run(is_atomic=True), again(is_atomic=True)], [], EFFECT_TWICE),
        ([TaskRow(1, "SUCCESSFUL", 2, result=1)], [run(), again()], [], ZOMBIE),
    ],
)
def test_each_verdict_has_its_cause(tasks, runs, absences, verdict):
    evidence = Evidence({1, *(task.id for task in tasks)}, tasks, runs, absences)
    assert {finding.verdict for finding in evidence.findings()} == {verdict} - {None}


def test_a_recovery_is_of_tasks_that_run_again_elsewhere_and_there_must_be_one():
    runs = [run(ended=None), run(2, ended=None), again(started=13.0), again(2, started=15.0), run(3)]
    recovery = Evidence((), (), runs).recovery({1, 2}, ONE, since=10.0)
    assert (recovery.first, recovery.last) == (3.0, 5.0)
    with pytest.raises(AssertionError, match="nothing is shown"):
        Evidence({1}, [DONE], [run()]).recovery({1}, ONE, since=10.0)
