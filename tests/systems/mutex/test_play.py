"""64 clients in four processes, kills in between: the play of the mutex, whose claims all hold."""

from __future__ import annotations

from example_project.systems.mutex.play import play


def test_no_row_is_in_two_hands_none_is_lost_and_no_retry_is_spent_twice(stage):
    play(stage)
    stage.judge()
