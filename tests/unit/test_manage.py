"""``manage.py test``: how it passes its arguments to pytest."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conftest import ROOT


@pytest.fixture
def manage():
    spec = importlib.util.spec_from_file_location("manage_under_test", ROOT / "manage.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ([], ["-q", "-n", "3", "--dist", "loadfile", "tests"]),
        (["tests/db", "-k", "lock"], ["tests/db", "-k", "lock"]),
        (["-k", "lock"], ["-k", "lock"]),
    ],
)
def test_without_arguments_all_tests_run(manage, monkeypatch, given, passed_on):
    received = []
    monkeypatch.setattr(pytest, "main", lambda arguments: received.append(arguments) or 0)
    monkeypatch.setattr(manage.os, "chdir", lambda folder: None)
    monkeypatch.setattr(manage.sys, "argv", ["manage.py", "test", *given])
    with pytest.raises(SystemExit) as ended:
        manage.run_tests()
    assert ended.value.code == 0
    assert received == [passed_on]
