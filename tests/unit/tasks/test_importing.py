"""Which modules of tasks are imported, and what the log says if that fails."""

from __future__ import annotations

import pytest

from django_pglock.tasks import importing
from tests.sample import tasks


@pytest.fixture
def tried(monkeypatch):
    """Import nothing, and return the names of the modules."""
    modules = []
    monkeypatch.setattr(importing, "_tried", set())
    monkeypatch.setattr(importing, "import_module", modules.append)
    return modules


def test_only_modules_inside_of_installed_apps_are_imported_each_once(tried):
    for path in (
        *(
            "tests.sample.absent.send",
            "tests.sample.absent.bill",
            "tests.sample.__main__.send",
            "tests.sample..mail.send",
        ),
        *("tests.sample_and_more.send", "os.path.join", "send", "", "tests.sample.tasks.no_such_function"),
    ):
        assert importing.import_function(path) is False
    assert importing.import_function(tasks.echo.module_path) is True
    assert tried == ["tests.sample.absent"]


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError(name="stripe"), ModuleNotFoundError("no name"), ValueError("no"), SystemExit(3)]
)
def test_the_log_says_why_a_module_cannot_be_imported(tried, monkeypatch, caplog, error):
    def fail(module):
        raise error

    monkeypatch.setattr(importing, "import_module", fail)
    assert importing.import_function("tests.sample.absent.send") is False
    [record] = caplog.records
    assert record.getMessage() == "The module tests.sample.absent of a task cannot be imported."
    assert (record.levelname, record.exc_info[1]) == ("WARNING", error)


@pytest.mark.parametrize("name", ["tests.sample.absent", "tests.sample"])
def test_a_module_that_does_not_exist_is_no_line_in_the_log(tried, monkeypatch, caplog, name):
    """The task may be of the next deployment. Workers report unknown tasks."""

    def fail(module):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(importing, "import_module", fail)
    assert importing.import_function("tests.sample.absent.send") is False
    assert not caplog.records


def test_an_imported_module_is_named_in_the_log(tried, caplog):
    caplog.set_level("INFO", logger="django_pglock.tasks")
    importing.import_function("tests.sample.absent.send")
    assert caplog.messages == ["Imported tests.sample.absent, the module of a task."]
