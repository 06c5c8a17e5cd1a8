"""The documentation runs: every Python block, page by page; every command that it names exists."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import types
import unittest
from pathlib import Path

import pytest
from django.apps import apps
from django.core.management import get_commands

import django_pglock
from django_pglock.models import Task
from django_pglock.tasks.definition import PostgresTask
from tests.conftest import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(python|console|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str, under: str = "") -> list[str]:
    """Return the code of a page, or of its section with this heading."""
    text = page.read_text()
    if under:
        text = text[text.index(f"\n## {under}\n") + 1 :].partition("\n## ")[0]
    return [code for language, code in BLOCK.findall(text) if language in languages]


def test_the_pages_have_python_and_console_blocks():
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 8
    assert sum(len(blocks(page, "console", "sh")) for page in PAGES) >= 5


def run_blocks(page: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Run all blocks of a page in one module, as for a reader who types them, and forget the enqueued tasks."""
    module = types.ModuleType(f"docs_{page.parent.stem}_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for label in ("catalogue", "orders", "payments", "post"):
        monkeypatch.setitem(apps.all_models, label, {})
    vars(module).update(INSTALLED_APPS=[], TASKS={})
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), vars(module))
    Task.objects.all().delete()
    return module


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks_run_in_order(page, monkeypatch):
    module = run_blocks(page, monkeypatch)
    cases = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    for case in (each for each in cases if isinstance(each, type) and issubclass(each, unittest.TestCase)):
        ran = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(case))
        assert ran.testsRun
        assert ran.wasSuccessful(), ran.errors + ran.failures


def test_the_front_door_has_at_most_fifteen_pages_and_4500_lines_in_all():
    """What is proof stands in docs/evidence. A page that grows makes another one shorter."""
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.stem != "index")]
    assert len(pages) <= 15
    assert sum(len(page.read_text().splitlines()) for page in pages) <= 4_500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_named_exist(page):
    known = set(get_commands()) | {"test"}
    for line in "\n".join(blocks(page, "console", "sh")).splitlines():
        words = shlex.split(line, comments=True)
        if "manage.py" in " ".join(words):
            place = next(index for index, word in enumerate(words) if word.endswith("manage.py"))
            assert words[place + 1] in known, line


def test_the_reference_page_shows_all_public_names():
    """Each public name must be in the reference."""
    page = (ROOT / "docs" / "reference.md").read_text().partition("## Names")[2].partition("\n## ")[0]
    shown = set(re.findall(r"(?:autofunction|autoclass):: django_pglock\.(?:[\w.]+\.)?(\w+)", page))
    # The page shows all of the module of errors.
    errors = {name for name in django_pglock.__all__ if name in vars(django_pglock.errors)}
    assert shown == set(django_pglock.__all__) - errors


def test_every_option_of_a_task_stands_in_the_table():
    table = (ROOT / "docs" / "tasks.md").read_text().partition("| option |")[2].partition("\n\n")[0]
    told = set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines() if row.count("|") > 2)))
    assert told == {each.name for each in dataclasses.fields(PostgresTask) if each.init} - {"func"}


def test_every_link_to_a_file_of_ours_leads_somewhere():
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_every_page_that_a_message_or_a_comment_names_is_there():
    """Messages of the package, and files that are read beside the pages."""
    read = ("django_pglock/**/*.py", "qa/**/*.p*", "deploy/*", "tests/**/*.py", ".github/**/*.*", "*.md", "*.toml")
    files = [path for pattern in read for path in ROOT.glob(pattern) if path.suffix != ".pyc" and path.is_file()]
    named = {found for path in files for found in re.findall(r"\bdocs/([\w/]+\.md)(?:#([\w-]+))?", path.read_text())}
    assert ("worker.md", "rights-in-the-database") in named
    pages = [(ROOT / "docs" / page, anchor) for page, anchor in sorted(named)]
    assert [page for page, anchor in pages if not page.exists() or (anchor and anchor not in anchors(page))] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and the documentation make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_picture_is_shown_and_all_together_are_small():
    """``docs/_ext/pictures.py`` makes the pictures. A picture that no page shows would become outdated."""
    pictures = [path for path in (ROOT / "docs" / "_static").rglob("*") if path.suffix in (".png", ".svg")]
    text = "".join(page.read_text() for page in PAGES)
    assert [each.name for each in pictures if f"/{each.name})" not in text] == []
    assert sum(each.stat().st_size for each in pictures) < 2_000_000


def test_every_test_that_is_named_exists():
    """Each row of the tables of guarantees needs a test that exists."""
    named = re.findall(r"`((?:tests|qa)/[\w/]+\.py)::(\w+)`", "".join(page.read_text() for page in PAGES))
    assert len(named) >= 50
    for file, name in named:
        assert re.search(rf"def {name}\(", (ROOT / file).read_text()), f"{file}::{name}"


def test_every_known_failure_has_its_test_or_its_reason():
    """The rows of the checklist: the failure, why it cannot happen, and the test. Its end: what is not covered."""
    page = (ROOT / "docs" / "evidence" / "failures.md").read_text()
    shown, _, left_out = page.partition("## What is not here")
    rows = [row.strip("| ").split(" | ") for row in re.findall(r"^\|(?! ?[-:]).+\|$", shown, re.MULTILINE)]
    rows = [row for row in rows if row[0] != "failure"]
    assert len(rows) >= 60
    for row in rows:
        assert len(row) == 3, row
        assert re.fullmatch(r"`(?:tests|qa)/[\w/]+\.py::test_\w+`", row[2]), row
        assert all(cell.endswith(".") for cell in row[:2]), row
    assert len({row[0] for row in rows}) == len(rows), "a failure stands there twice"
    assert all(len(row.split(" | ")) == 2 for row in re.findall(r"^\| \w.+\|$", left_out, re.MULTILINE))
