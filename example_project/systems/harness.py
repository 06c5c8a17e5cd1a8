"""What a scenario uses: a screen, processes that end with it, and claims that are asked of the database."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from django.db import connection

from example_project.demo.evidence import Finding
from example_project.demo.processes import Fleet
from example_project.demo.screen import Screen

#: Seconds in which processes that live let go of the locks of work that has just been done.
LET_GO = 30.0
HELD = "SELECT count(*) FROM django_pglock_advisorylock WHERE key IS NOT NULL"


class Harness:
    """One run of one system. A scenario says what it does, starts processes, and claims what then holds."""

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
        self.findings.append(Finding(text, count(statement, parameters)))

    def claim_no_lock_is_left(self) -> None:
        """Claim that no advisory lock was left behind. Processes that still run may let go of theirs for a while."""
        deadline = time.monotonic() + LET_GO
        while count(HELD) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.claim("No advisory lock was left behind", HELD)

    @property
    def holds(self) -> bool:
        """Whether there are claims, and all of them hold."""
        return bool(self.findings) and all(finding.holds for finding in self.findings)


def count(statement: str, parameters: tuple[object, ...] = ()) -> int:
    """Return the number that a statement returns."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters or None)
        return int(cursor.fetchone()[0])


def call(fleet: Fleet, function: Callable[..., object], *arguments: Any, **environment: str) -> subprocess.Popen[bytes]:
    """Call a module's function in a process of the fleet, with arguments that JSON can hold."""
    path = f"{function.__module__}:{function.__qualname__}"
    words = [json.dumps(argument) for argument in arguments]
    return fleet.run([sys.executable, "-m", "example_project.systems.client", path, *words], **environment)
