"""The scenario of the system checkout: what it claims holds."""

from __future__ import annotations

from example_project.systems.checkout import scenario


def test_the_checkout_system_has_no_violation_under_load(harness, monkeypatch):
    """With one process of uvicorn, which is a new interpreter otherwise. The tests of the endpoint have two."""
    monkeypatch.setattr(scenario, "UVICORN", scenario.UVICORN.replace("--workers=2", "--workers=1"))
    scenario.run_scenario(harness)
    harness.judge()
