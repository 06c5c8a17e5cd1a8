"""Each system is a page: a docstring that tells its problem, and at most 120 lines that a user would write."""

from __future__ import annotations

from pathlib import Path

import pytest

import example_project.systems
from example_project.systems import NAMES

FOLDER = Path(example_project.systems.__file__).parent
MOST_LINES = 120
#: Not written by a user of the library: what Django writes, and what shows the system.
NOT_OF_USERS = ("__init__.py", "apps.py", "scenario.py")


def test_every_folder_with_an_app_is_named():
    assert sorted(path.parent.name for path in FOLDER.glob("*/apps.py")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_system_is_a_page(name):
    files = [path for path in (FOLDER / name).glob("*.py") if path.name not in NOT_OF_USERS]
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    assert lines, f"{name} has no code"
    assert sum(lines.values()) <= MOST_LINES, lines


@pytest.mark.parametrize("name", NAMES)
def test_a_system_has_a_play(name):
    assert (FOLDER / name / "scenario.py").exists()
