"""The task functions that a process knows."""

from __future__ import annotations

import sys

import pytest

from django_pglock import task
from django_pglock.tasks import registry
from tests.sample import scheduled

pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.fixture(autouse=True)
def empty(own_registry, monkeypatch):
    monkeypatch.setattr(registry, "_definitions", {})


def send(): ...


async def bill(): ...


def test_the_last_function_of_a_path_is_the_one_that_runs():
    """As in a module that is loaded again. A copy of ``using()`` does not replace its definition."""
    definition = task(send)
    copy = definition.using(priority=5)
    assert registry.find(definition.module_path) is definition
    assert registry.register(copy) is definition
    again = type(send)(send.__code__, send.__globals__)
    again.__module__, again.__qualname__ = send.__module__, send.__qualname__
    replaced = task(again)
    assert registry.find(definition.module_path) is replaced
    assert registry.find("shop.send") is None


def test_paths_are_in_order_and_counted():
    sent, billed = task(send), task(bill)
    assert registry.known_paths() == [billed.module_path, sent.module_path]
    assert registry.count() == 2
    assert registry.is_async(billed.module_path)
    assert not registry.is_async(sent.module_path)
    assert not registry.is_async("shop.send")


def test_only_functions_with_a_schedule_run_by_the_clock_and_in_the_order_of_their_paths():
    task(send)
    nightly, group = task(every=5)(scheduled.nightly), task(every=5, group="all")(scheduled.with_argument)
    assert registry.scheduled() == [nightly, group]


PATH = "tests.sample.mail.deliver"


@pytest.fixture(autouse=True)
def modules_are_not_imported(monkeypatch):
    """Forget the modules of these tests, before and after each."""
    monkeypatch.setattr(registry, "_definitions", {k: v for k, v in registry._definitions.items() if k != PATH})
    monkeypatch.setattr(registry, "_tried", set())
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
    monkeypatch.setattr(registry, "import_module", tried.append)
    for path in ("tests.sample.broken.a", "tests.sample.broken.b", "tests.sample.broken.a"):
        assert registry.import_function(path) is False
    assert tried == ["tests.sample.broken"]


def test_a_function_is_known_after_the_import_of_its_module(caplog):
    caplog.set_level("INFO", logger="django_pglock.tasks")
    assert registry.find(PATH) is None
    assert registry.import_function(PATH) is True
    assert registry.find(PATH).name == "deliver"
    assert sys.modules["tests.sample.mail"].imports == 1
    assert registry.import_function(PATH) is True
    assert caplog.messages == ["Imported tests.sample.mail, the module of a task."]
    assert registry.import_function("tests.sample.mail.not_decorated") is False


#: Modules of an installed app, which are there or may come with a later version.
TRIED = ("tests.sample.mail.", "tests.sample.broken.", "tests.sample.no.")


@pytest.mark.parametrize("path", [path for path in NEVER if not path.startswith(TRIED)])
def test_only_modules_of_installed_apps_are_tried(monkeypatch, path):
    """Any program that can write to the table of tasks can choose the path."""
    tried = []
    monkeypatch.setattr(registry, "import_module", tried.append)
    assert registry.import_function(path) is False
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

    monkeypatch.setattr(registry, "import_module", fail)
    assert registry.import_function("tests.sample.later.tasks.send") is False
    text = "The module tests.sample.later.tasks of a task cannot be imported."
    assert caplog.messages == [text] * is_logged
    assert [(each.levelname, each.exc_info[1]) for each in caplog.records] == [("WARNING", error)] * is_logged
