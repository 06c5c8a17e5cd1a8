"""The reference pages contain all names of the code, and no others."""

from __future__ import annotations

import dataclasses
import importlib
import re
from unittest.mock import MagicMock

import pytest
from django.dispatch import Signal

from django_pglock import Lease, errors, lock, signals
from django_pglock.locks.coroutines import AsyncHandle
from django_pglock.locks.handle import Handle
from django_pglock.locks.leases import LeaseHandle
from django_pglock.loggers import WORKER
from django_pglock.management.commands import withlock
from django_pglock.tasks.claim import TaskContext
from django_pglock.tasks.definition import PostgresTask
from django_pglock.tasks.fields import OPTIONS, TaskFields
from django_pglock.tasks.states import MOVES, TaskStatus
from django_pglock.worker.child.child import LEFT_BEHIND
from django_pglock.worker.parent.probes import attempt_families, depth_families, gauges
from example_project.systems import NAMES
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reference.md").read_text()


ADMIN = (ROOT / "docs" / "admin.md").read_text()
#: The sections that quote messages as symptoms.
SYMPTOMS = ("My task does not run", "Everything waits", "Runbook")


SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "django_pglock").rglob("*.py")))
HANDLES = (Handle, AsyncHandle, LeaseHandle)
#: What the package itself calls on handles.
OF_THE_PACKAGE = {
    "acquire",
    "detach",
    "free_from_any_thread",
    "release_from_any_thread",
    "is_disabled",
    "is_done",
    "is_open",
    "options",
    "request",
}


def section(title: str, page: str = PAGE) -> str:
    return page.partition(f"# {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """Return what stands in code in the first cells of tables."""
    return re.findall(r"`([\w.]+)", "".join(re.findall(r"^\|([^|]*)\|", text, re.MULTILINE)))


def test_every_option_of_a_task_has_its_sentence():
    explained = set(re.findall(r"^    - ``(\w+)``: ", TaskFields.__doc__ or "", re.MULTILINE))
    assert explained == {each.name for each in dataclasses.fields(PostgresTask) if each.init} - {"func"}
    assert "{options-list}" in section("Options of a task")


def test_every_attribute_of_a_handle_stands_in_the_table():
    made = [each._handle(each._request_for(("a",))) for each in (lock("a"), Lease("a", ttl=60))]
    has = {name for each in [*HANDLES, *map(vars, made)] for name in ([*dir(each)] if isinstance(each, type) else each)}
    public = {name for name in has if not name.startswith("_")} - OF_THE_PACKAGE
    assert set(first_cells(section("Handles"))) - {"attribute"} == public


def test_every_attribute_of_a_context_is_shown():
    own = {name for name in vars(TaskContext) if not name.startswith("_")}
    [members] = re.findall(r"TaskContext\n   :members: (.*)", PAGE)
    assert set(members.split(", ")) == own


def test_every_signal_is_shown():
    """Sphinx shows the names that a comment explains."""
    named = {name for name, each in vars(signals).items() if isinstance(each, Signal)}
    text = (ROOT / "django_pglock" / "signals.py").read_text()
    assert set(re.findall(r"^#: .*\n(\w+) = Signal", text, re.MULTILINE)) == named


def test_the_lists_that_are_printed_from_the_code_are_complete(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    printed = importlib.import_module("code_facts")
    numbers = set(re.findall(r'"(?:django_pglock\.)?([EW]\d{3})"', SOURCE))
    checks = dict(printed.checks())
    assert set(checks) == {f"django_pglock.{number}" for number in numbers}
    assert all(len(text) > 30 for text in checks.values()), checks
    assert len([*printed.options()]) == len(OPTIONS)
    names = {term.partition("{")[0] for term, _ in printed.metrics()}
    assert names == {f"django_pglock_{name}" for name in metrics()}


def metrics():
    health = MagicMock()
    health.beat_age.return_value = 1.0
    return [family.name for family in (*gauges(health), *depth_families([]), *attempt_families({}))]


def test_every_logger_stands_in_the_table():
    table = section("Other loggers", ADMIN)
    used = set(re.findall(r'get_logger\("(django_pglock\.\w+)"\)', SOURCE)) | {WORKER}
    assert set(first_cells(table)) == used


def test_every_exit_code_stands_in_the_table():
    table = section("Exit codes")
    assert f"| `runlockworker` | {LEFT_BEHIND} |" in table
    assert f"| `withlock` | {withlock.EX_TEMPFAIL} |" in table
    assert f"| `withlock` | {withlock.EX_SOFTWARE} |" in table


def test_every_status_is_a_symptom_of_a_task_that_does_not_run():
    page = section("My task does not run", ADMIN)
    assert set(re.findall(r"^\| ([A-Z]+)\b", page, re.MULTILINE)) == set(TaskStatus.values)


def test_messages_that_pages_quote_as_symptoms_are_messages_of_the_code():
    of_the_server = {"sorry, too many clients already", "permission denied"}
    messages = re.sub(r'"\s*\n\s*f?"', "", SOURCE)  # texts that continue in the next line
    on_call = (ROOT / "docs" / "evidence" / "inside.md").read_text()
    pages = "\n".join([on_call, *(section(title, ADMIN) for title in SYMPTOMS)])
    # Tables and runbooks, without blocks of code.
    quoted = set(re.findall(r'"([^"\n]{12,})"', re.sub(r"```.*?```", "", pages, flags=re.DOTALL)))
    assert {"which no running worker has imported", "No worker knows this task"} <= quoted
    assert {text for text in quoted - of_the_server if text not in messages} == set()


def test_every_thread_and_session_stands_in_the_page_for_people_on_call():
    page = (ROOT / "docs" / "evidence" / "inside.md").read_text()
    worker = "\n".join(path.read_text() for path in (ROOT / "django_pglock" / "worker").rglob("*.py"))
    threads = set(re.findall(r'(?:name|thread_name_prefix)=f?"(lockworker-[a-z-]+[a-z])', worker))
    services = set(re.findall(r'^    name = "([a-z]+)"', worker, re.MULTILINE)) - {"service"}
    assert len(threads) >= 5
    assert len(services) == 4
    assert set(re.findall(r"`(lockworker-[a-z-]+[a-z])", page)) == threads | {f"lockworker-{name}" for name in services}
    named = set(re.findall(r'application_name="(lockworker \w+)"', worker))
    assert set(re.findall(r"^\| `(lockworker \w+)`", page, re.MULTILINE)) == named | {
        f"lockworker {name}" for name in services
    }


def test_the_times_that_the_guarantees_quote_are_in_the_report_of_the_faults():
    guarantees = (ROOT / "docs" / "guarantees.md").read_text()
    table = guarantees.partition("| fault | promised | measured |")[2].partition("\n\n")[0]
    report = (ROOT / "docs" / "evidence" / "reliability.md").read_text().partition("<!-- chaos: begin -->")[2]
    times = [float(number) for number in re.findall(r"([\d.]+) s\b", table)]
    assert len(times) >= 10
    assert [time for time in times if f"| {time:.1f} s |" not in report] == []


# The page about the architecture names files that are there, and its picture is current.


ARCHITECTURE = ROOT / "docs" / "evidence" / "architecture.md"


NAMED = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", ARCHITECTURE.read_text())))


@pytest.mark.parametrize("name", NAMED)
def test_every_file_named_in_the_architecture_page_exists(name):
    places = [ROOT / "django_pglock" / name, ROOT / name]
    assert any(place.exists() for place in places), f"{name} is named in {ARCHITECTURE.name} and is not there"


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
    assert (ROOT / "docs" / "_static" / "task-way.svg").read_text().count("<rect ") <= 10
    for part in parts:
        assert list((ROOT / "django_pglock" / "worker").rglob(f"{part}.py")), part


def test_the_way_of_a_lock_ends_with_errors_that_are_there():
    named = titles_of_boxes("lock-way.svg", "#c53030")
    assert len(named) == 2
    assert all(issubclass(getattr(errors, name), errors.LockError) for name in named)


def test_each_example_has_at_most_three_files_which_have_the_functions_that_it_names():
    examples = ARCHITECTURE.read_text().partition("### Two examples\n")[2].partition("\n## ")[0]
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


# The pages about the systems of the example project: they show the code that runs, and what it wrote.


FOLDER = ROOT / "docs" / "evidence" / "systems"


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
    assert f"](../../_static/systems/{name}.svg)" in PAGES[name]
    picture = (ROOT / "docs" / "_static" / "systems" / f"{name}.svg").read_text()
    assert "✓" in picture
    assert "✗" not in picture
