"""The pages about the systems of the example project: they show the code that runs, and what it wrote."""

from __future__ import annotations

import re

import pytest

from example_project.systems import NAMES
from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "systems"
PAGES = {page.stem: page.read_text() for page in FOLDER.glob("*.md") if page.stem != "index"}


def test_each_system_has_a_page_that_stands_in_the_index():
    index = (FOLDER / "index.md").read_text()
    assert sorted(PAGES) == sorted(NAMES)
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\)", index, re.MULTILINE)
    assert sorted(listed) == [(name, name) for name in sorted(PAGES)]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_the_code_that_runs(name):
    """A copy would differ one day."""
    shown = re.findall(r"\{literalinclude\} (\S+)", PAGES[name])
    assert shown
    for path in shown:
        file = (FOLDER / path).resolve()
        assert file.exists(), path
        assert file.is_relative_to(ROOT / "example_project" / "systems" / name), path
    assert f".. automodule:: example_project.systems.{name}\n" in PAGES[name]
    assert "```python" not in PAGES[name]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_the_output_with_claims_that_hold(name):
    """``python docs/_ext/pictures.py NAME`` draws it."""
    assert f"](../_static/systems/{name}.svg)" in PAGES[name]
    picture = (ROOT / "docs" / "_static" / "systems" / f"{name}.svg").read_text()
    assert "✓" in picture
    assert "✗" not in picture
