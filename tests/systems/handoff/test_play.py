"""The same requests through tasks and through the table, with kills of back ends in between."""

from __future__ import annotations

from io import StringIO

from example_project.demo.screen import Screen
from example_project.systems.handoff.play import play, requests, sheets_after
from example_project.systems.stage import Stage


def test_both_planes_make_the_sheets_that_the_requests_ask_for(fleet):
    out = StringIO()
    stage = Stage(Screen(out), fleet)
    play(stage, count=2000, sheets=50, orders=200)
    assert stage.holds, [finding for finding in stage.findings if not finding.holds]
    assert out.getvalue().count("SIGKILL") == 4
    assert "One UPDATE changes 400 rows, two of each order: 1 task." in out.getvalue()


def test_the_requests_are_what_the_play_says():
    asked = list(requests(2000, 50))
    kinds = [each.kind for each in asked]
    assert 50 < kinds.count("create") < 250
    assert kinds[0] == "create"
    sheets = sheets_after(iter(asked))
    assert len(sheets) == 50
    assert sum(map(len, sheets.values())) == kinds.count("update")
