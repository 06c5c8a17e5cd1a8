"""The scenario of the system checkout: what it claims holds."""

from __future__ import annotations

from example_project.systems.checkout.scenario import run_scenario


def test_the_checkout_system_has_no_violation_under_load(harness):
    run_scenario(harness)
    harness.judge()
