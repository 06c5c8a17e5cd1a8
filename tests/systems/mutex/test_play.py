"""32 clients in four processes, kills in between: the play of the mutex, whose claims all hold."""

from __future__ import annotations

from example_project.systems.mutex import play as system


def test_the_mutex_system_loses_no_row_and_has_one_owner_of_each(stage, monkeypatch):
    monkeypatch.setattr(system, "THREADS", 8)
    system.play(stage)
    stage.judge()
