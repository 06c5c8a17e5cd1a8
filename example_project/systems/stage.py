"""What a play uses: a screen, processes that end with it, and claims that are asked of the database."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from django.db import connection

from example_project.demo.evidence import Finding
from example_project.demo.processes import Fleet
from example_project.demo.screen import Screen


class Stage:
    """One run of one system. A play says what it does, starts processes, and claims what then holds."""

    def __init__(self, screen: Screen, fleet: Fleet) -> None:
        self.screen = screen
        self.fleet = fleet
        self.findings: list[Finding] = []

    def say(self, text: str) -> None:
        """Write a sentence on a line of its own."""
        self.screen.say(text)

    def call(self, function: Callable[..., object], *arguments: Any, **environment: str) -> subprocess.Popen[bytes]:
        """Call a module's function in a process of its own, with arguments that JSON can hold."""
        return call(self.fleet, function, *arguments, **environment)

    def claim(self, text: str, statement: str, *parameters: object) -> None:
        """Claim something that holds if the statement, which counts what violates it, returns 0."""
        with connection.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            self.findings.append(Finding(text, int(cursor.fetchone()[0])))

    @property
    def holds(self) -> bool:
        """Whether there are claims, and all of them hold."""
        return bool(self.findings) and all(finding.holds for finding in self.findings)


def call(fleet: Fleet, function: Callable[..., object], *arguments: Any, **environment: str) -> subprocess.Popen[bytes]:
    """Call a module's function in a process of the fleet, with arguments that JSON can hold."""
    path = f"{function.__module__}:{function.__qualname__}"
    words = [json.dumps(argument) for argument in arguments]
    return fleet.run([sys.executable, "-m", "example_project.systems.client", path, *words], **environment)
