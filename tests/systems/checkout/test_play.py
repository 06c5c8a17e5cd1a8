"""The play of the system checkout: what it claims holds."""

from __future__ import annotations

from example_project.systems.checkout.play import play


def test_the_checkout_system_has_no_violation_under_load(stage):
    play(stage)
    stage.judge()
