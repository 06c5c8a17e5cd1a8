"""``manage.py systems ledger`` runs, and what it claims holds."""

from __future__ import annotations

from tests.conftest import NEVER


def test_the_play_holds(fleet):
    process = fleet.start("systems", "ledger")
    assert process.wait(2 * NEVER) == 0, fleet.output()
    assert "✗" not in fleet.output()
