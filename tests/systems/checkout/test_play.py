"""The play of the system checkout: what it claims holds."""

from __future__ import annotations

from example_project.systems.checkout.play import play


def test_the_play_holds(stage):
    play(stage)
    stage.judge()
