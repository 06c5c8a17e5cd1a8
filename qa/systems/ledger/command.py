"""``manage.py systems ledger`` in a process of its own."""

from __future__ import annotations

from django.core.management import execute_from_command_line

from example_project.demo.processes import Fleet
from tests.warm.process import start


def run() -> None:
    """Run the command. The processes of the scenario are forked by a warm parent."""
    Fleet.open = staticmethod(start)
    execute_from_command_line(["manage.py", "systems", "ledger", "--no-color"])
