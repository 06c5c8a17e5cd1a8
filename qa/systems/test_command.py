"""``manage.py systems``: what it lists and refuses, and that it runs the scenario of each system.

The tests of each system run its scenario. Those of the ledger run it by this command, as users do.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from example_project.systems import NAMES
from tests.sample.tasks import nothing


def test_the_systems_command_without_a_name_lists_the_systems():
    out = StringIO()
    call_command("systems", stdout=out)
    assert [line.split()[0] for line in out.getvalue().splitlines()] == list(NAMES)


def test_an_unknown_name_is_refused():
    with pytest.raises(CommandError, match="nothing"):
        call_command("systems", "nothing")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_others_are_not_deleted(name):
    nothing.enqueue()
    with pytest.raises(CommandError, match=r"has rows in django_pglock_task\. .* --erase"):
        call_command("systems", name)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("violations", [0, 1])
def test_the_systems_command_ends_with_1_if_a_claim_does_not_hold(name, violations, monkeypatch, capsys):
    module = importlib.import_module(f"example_project.systems.{name}.scenario")
    monkeypatch.setattr(
        module, "run_scenario", lambda harness: harness.claim(f"{name} is sound", f"SELECT {violations}")
    )
    with pytest.raises(CommandError, match="does not hold") if violations else nullcontext():
        call_command("systems", name)
    mark = "✗" if violations else "✓"
    assert f"{mark} {name} is sound" in capsys.readouterr().out
