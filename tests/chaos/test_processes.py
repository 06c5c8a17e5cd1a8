"""What happens to workers: signals, and tasks that take their process down."""

from __future__ import annotations

import signal

import pytest


@pytest.mark.short
@pytest.mark.fault("SIGKILL of a worker")
def test_a_killed_worker(stage, eventually):
    """At default settings."""
    victim, *_others = stage.workers(3, "--threads", "2")
    stage.load(60, seconds=0.1)
    eventually(lambda: stage.running(30), why="the work did not begin")
    blow = stage.strike(victim, signal.SIGKILL)
    assert blow.hands, "the victim had nothing in hand"
    eventually(stage.is_over, seconds=60, why="some task is stuck")
    recovery = stage.judge().recovery(blow.hands, blow.victim, blow.at)
    stage.show("its tasks run elsewhere", recovery.last, bound=10)
    stage.show("others go on", recovery.others, bound=2)
