"""The table of states and moves."""

from __future__ import annotations

from django_pglock.tasks.states import FINISHED, MOVES, WAITING, TaskStatus


def test_the_table_of_moves_has_every_status():
    """A status that is missing in the table could never be left."""
    assert set(MOVES) == set(TaskStatus)


def test_only_a_person_moves_a_task_that_is_finished():
    """By a retry or, if it has failed, by a discard. No worker may touch the row again."""
    for status in FINISHED - {TaskStatus.FAILED}:
        assert MOVES[status] <= {TaskStatus.READY, TaskStatus.BLOCKED}
    assert MOVES[TaskStatus.FAILED] == {TaskStatus.READY, TaskStatus.BLOCKED, TaskStatus.CANCELLED}
    assert MOVES[TaskStatus.SUCCESSFUL] == frozenset()


def test_only_ready_tasks_can_be_claimed():
    assert {source for source, targets in MOVES.items() if TaskStatus.RUNNING in targets} == WAITING


def test_every_status_can_be_reached_and_all_families_are_disjoint():
    reachable = {target for targets in MOVES.values() for target in targets}
    assert reachable | WAITING == set(TaskStatus)
    assert not FINISHED & WAITING
    assert FINISHED | WAITING | {TaskStatus.RUNNING} == set(TaskStatus)
