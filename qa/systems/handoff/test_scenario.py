"""The same requests through tasks and through the table, with kills of back ends in between."""

from __future__ import annotations

from example_project.systems.handoff.scenario import requests, run_scenario, sheets_after


def test_both_planes_make_the_sheets_that_the_requests_ask_for(harness):
    run_scenario(harness, count=1000, sheets=50, orders=100)
    told = harness.judge()
    assert told.count("SIGKILL") == 4
    assert "One UPDATE changes 200 rows, two of each order: 1 task." in told


def test_the_requests_are_what_the_play_says():
    asked = list(requests(2000, 50))
    kinds = [each.kind for each in asked]
    assert 50 < kinds.count("create") < 250
    assert kinds[0] == "create"
    sheets = sheets_after(iter(asked))
    assert len(sheets) == 50
    assert sum(map(len, sheets.values())) == kinds.count("update")
