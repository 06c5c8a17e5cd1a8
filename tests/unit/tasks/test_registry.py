"""The task functions that a process knows."""

from __future__ import annotations

import sys
from types import ModuleType

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


def test_a_function_that_takes_turns_is_known():
    task(send)
    assert not registry.has_fair()
    task(fair="{name}")(scheduled.nightly)
    assert registry.has_fair()


def test_a_function_that_no_worker_could_import_is_recognised(monkeypatch):
    def inner(): ...

    assert registry.why_not_found(send) is None
    assert "inside another function" in registry.why_not_found(inner)
    assert "is a lambda" in registry.why_not_found(lambda: None)
    monkeypatch.setitem(sys.modules, "somewhere", ModuleType("somewhere"))
    for module, is_found in (("somewhere", True), ("nowhere", False), ("__main__", False), (None, False)):
        function = type(send)(send.__code__, {})
        function.__module__ = module
        why = registry.why_not_found(function)
        assert why is None if is_found else "in a shell, a notebook or a script" in why
