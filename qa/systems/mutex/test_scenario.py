"""32 clients in four processes, kills in between: the scenario of the mutex, whose claims all hold."""

from __future__ import annotations

from example_project.systems.mutex import scenario as system


def test_the_mutex_system_loses_no_row_and_has_one_owner_of_each(harness, monkeypatch):
    monkeypatch.setattr(system, "THREADS", 8)
    monkeypatch.setattr(system, "ROWS", 200)
    system.run_scenario(harness)
    harness.judge()
