"""What users write keeps its name: the recorded list is that of the code."""

from __future__ import annotations

from tests.public_api import RECORDED, names


def test_the_recorded_names_are_those_of_the_code():
    recorded, found = set(RECORDED.read_text().splitlines()), set(names())
    assert not recorded - found, "gone, so users' code breaks; see 'What stays stable' in docs/reference.md"
    assert not found - recorded, "new; if they are to be promised, run: .venv/bin/python -m tests.public_api"
