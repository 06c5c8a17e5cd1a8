"""Modules of task functions are imported once, and only inside of installed apps."""

from __future__ import annotations

import sys

import pytest

from django_pglock.tasks import importing, registry

PATH = "tests.sample.mail.deliver"


@pytest.fixture(autouse=True)
def modules_are_not_imported(monkeypatch):
    """Forget the modules of these tests, before and after each."""
    monkeypatch.setattr(registry, "_definitions", {k: v for k, v in registry._definitions.items() if k != PATH})
    monkeypatch.setattr(importing, "_tried", set())
    modules = ("tests.sample.mail", "tests.sample.broken", "tests.sample.__main__", "tests.evil")

    def forget():
        for name in modules:
            sys.modules.pop(name, None)

    forget()
    yield
    forget()


NEVER = [
    "tests.evil.anything",
    "tests.sample.mail.not_decorated",
    "tests.sample.mail.imports",
    "tests.sample.broken.anything",
    "tests.sample.__main__.anything",
    "tests.sample.no.such.module",
    "tests.sample_and_more.tasks.send",
    "tests.sample..mail.deliver",
    "tests.sample.mail.deliver.func",
    "os.system",
    "django.core.management.call_command",
]


def test_a_module_that_cannot_be_imported_is_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(importing, "import_module", tried.append)
    for path in ("tests.sample.broken.a", "tests.sample.broken.b", "tests.sample.broken.a"):
        assert importing.import_function(path) is False
    assert tried == ["tests.sample.broken"]


def test_a_function_is_known_after_the_import_of_its_module(caplog):
    caplog.set_level("INFO", logger="django_pglock.tasks")
    assert registry.find(PATH) is None
    assert importing.import_function(PATH) is True
    assert registry.find(PATH).name == "deliver"
    assert sys.modules["tests.sample.mail"].imports == 1
    assert importing.import_function(PATH) is True
    assert caplog.messages == ["Imported tests.sample.mail, the module of a task."]
    assert importing.import_function("tests.sample.mail.not_decorated") is False


#: Modules of an installed app, which are there or may come with a later version.
TRIED = ("tests.sample.mail.", "tests.sample.broken.", "tests.sample.no.")


@pytest.mark.parametrize("path", [path for path in NEVER if not path.startswith(TRIED)])
def test_only_modules_of_installed_apps_are_tried(monkeypatch, path):
    """Any program that can write to the table of tasks can choose the path."""
    tried = []
    monkeypatch.setattr(importing, "import_module", tried.append)
    assert importing.import_function(path) is False
    assert tried == []


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        (ModuleNotFoundError(name="tests.sample.later"), False),
        (ModuleNotFoundError(name="tests.sample.later.tasks"), False),
        (ModuleNotFoundError(name="tests.sample.late"), True),
        (ModuleNotFoundError(name="redis"), True),
        (ModuleNotFoundError(), True),
        (ImportError(name="tests.sample.later.tasks"), True),
        (SystemExit(3), True),
    ],
)
def test_a_module_that_is_missing_is_no_error_and_one_that_fails_is_logged(monkeypatch, caplog, error, is_logged):
    """A missing module was removed, or comes with the next deployment. A missing package is an error of the host."""

    def fail(module):
        raise error

    monkeypatch.setattr(importing, "import_module", fail)
    assert importing.import_function("tests.sample.later.tasks.send") is False
    text = "The module tests.sample.later.tasks of a task cannot be imported."
    assert caplog.messages == [text] * is_logged
    assert [(each.levelname, each.exc_info[1]) for each in caplog.records] == [("WARNING", error)] * is_logged
