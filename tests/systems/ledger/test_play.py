"""``manage.py systems ledger`` runs, and what it claims holds."""

from __future__ import annotations

from example_project.demo.processes import Fleet
from tests.conftest import NEVER


def test_the_play_holds(environment):
    """As users run it: each process is a new interpreter. The other plays run in the process of their test."""
    fleet = Fleet(environment)
    try:
        process = fleet.start("systems", "ledger")
        assert process.wait(2 * NEVER) == 0, fleet.output()
        assert "✗" not in fleet.output()
    finally:
        fleet.stop()
