"""The page about the architecture names files that are there, and its picture is current."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "architecture.md"
NAMED = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", PAGE.read_text())))


@pytest.mark.parametrize("name", NAMED)
def test_a_file_that_is_named_is_there(name):
    places = [ROOT / "django_pglock" / name, ROOT / name]
    assert any(place.exists() for place in places), f"{name} is named in {PAGE.name} and is not there"


def test_files_are_named():
    assert len(NAMED) > 20


def test_the_picture_of_the_rooms_is_current(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    rooms = importlib.import_module("rooms")
    assert rooms.PICTURE.read_text() == rooms.picture(), "run: python docs/_ext/rooms.py"
