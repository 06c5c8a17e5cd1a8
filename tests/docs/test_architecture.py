"""The page about the architecture names files that are there, and its picture is current."""

from __future__ import annotations

import importlib
import re

import pytest

from django_pglock import errors
from django_pglock.tasks.states import MOVES, TaskStatus
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "architecture.md"
NAMED = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", PAGE.read_text())))


@pytest.mark.parametrize("name", NAMED)
def test_every_file_named_in_the_architecture_page_exists(name):
    places = [ROOT / "django_pglock" / name, ROOT / name]
    assert any(place.exists() for place in places), f"{name} is named in {PAGE.name} and is not there"


def test_the_picture_of_the_rooms_is_current(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    rooms = importlib.import_module("rooms")
    assert rooms.PICTURE.read_text() == rooms.picture(), "run: python docs/_ext/rooms.py"


def titles_of_boxes(picture, colour=".+?"):
    text = (ROOT / "docs" / "_static" / picture).read_text()
    return re.findall(rf'<rect [^>]*fill="{colour}"/><text [^>]*font-weight="600">([^<]+)<', text)


def test_the_way_of_a_task_has_statuses_and_parts_that_are_there():
    rows = [TaskStatus(title.split()[0]) for title in titles_of_boxes("task-way.svg") if title.endswith(" row")]
    assert rows == [TaskStatus.READY, TaskStatus.SUCCESSFUL]
    assert set(MOVES[TaskStatus.RUNNING]) >= {*rows, TaskStatus.FAILED}
    parts = [title.split()[0] for title in titles_of_boxes("task-way.svg", "#6b46c1")]
    assert len(parts) == 5
    for part in parts:
        assert list((ROOT / "django_pglock" / "worker").rglob(f"{part}.py")), part


def test_the_way_of_a_lock_ends_with_errors_that_are_there():
    named = titles_of_boxes("lock-way.svg", "#c53030")
    assert len(named) == 2
    assert all(issubclass(getattr(errors, name), errors.LockError) for name in named)


def test_each_example_has_at_most_three_files_which_have_the_functions_that_it_names():
    examples = PAGE.read_text().partition("### Two examples\n")[2].partition("\n## ")[0]
    walks = [each for each in re.split(r"^(?=\*\*)", examples, flags=re.MULTILINE) if each.startswith("**")]
    assert len(walks) == 2
    for walk in walks:
        steps = re.findall(r"^\d\. `([a-z_/]+\.py)`(.*?)(?=^\d\. |\n\n|\Z)", walk, re.MULTILINE | re.DOTALL)
        assert len(steps) >= 3
        assert len({name for name, _ in steps}) <= 3
        for name, text in steps:
            source = (ROOT / "django_pglock" / name).read_text()
            functions = re.findall(r"`(?:\w+\.)?(\w+)\(\)`", text)
            assert functions
            assert [function for function in functions if f"{function}(" not in source] == [], name
