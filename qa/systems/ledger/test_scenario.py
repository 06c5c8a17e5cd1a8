"""``manage.py systems ledger`` runs, and what it claims holds."""

from __future__ import annotations

from example_project.systems.harness import call
from qa.systems.ledger.command import run
from tests.conftest import NEVER


def test_the_command_of_the_ledger_finds_no_violation(fleet):
    """In a process of its own, as users run it. The other scenarios run in the process of their test."""
    process = call(fleet, run)
    assert process.wait(2 * NEVER) == 0, fleet.output()
    assert "✓" in fleet.output()
    assert "✗" not in fleet.output()
