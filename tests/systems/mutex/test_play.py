"""64 clients in four processes, kills in between: the play of the mutex, whose claims all hold."""

from __future__ import annotations

from tests.conftest import NEVER


def test_no_row_is_in_two_hands_none_is_lost_and_no_retry_is_spent_twice(fleet):
    assert fleet.start("systems", "mutex").wait(2 * NEVER) == 0, fleet.output()
