"""One run of a measurement: the contestants that take part, the rounds, and the figures of each case."""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import psycopg

from bench.contestants import ALL
from bench.contestants.base import Contestant, Failed
from bench.testbed import Testbed

#: The name of what is measured, and how: returns one number, or several.
Case = Callable[[], Any]

OURS, RAW = "django_pglock", "raw psycopg"


class Bench:
    """One run of one subcommand: the contestants that take part, the rounds, and what came of them."""

    def __init__(self, testbed: Testbed, options: argparse.Namespace, stack: ExitStack) -> None:
        self.testbed = testbed
        self.rounds: int = options.rounds
        self.tasks: int = options.tasks
        self.failed: dict[str, str] = {}
        self.contestants: dict[str, Contestant] = {}
        self.cases: str = options.cases
        self._only: list[str] = options.only
        self._cache: Path = options.cache
        self._stack = stack

    @property
    def ours(self) -> Contestant:
        return self.contestants[OURS]

    def enter(self, names: Sequence[str]) -> list[Contestant]:
        """Install who is named (nobody: all), and return who is there; the others are noted with their reasons."""
        for kind in ALL:
            wanted = kind.name in (names or [kind.name])
            if wanted and any(word.lower() in kind.name.lower() for word in self._only or [kind.name]):
                self._install(kind(self._cache))
        return list(self.contestants.values())

    def _install(self, contestant: Contestant) -> None:
        print(f"installing {contestant.name}", file=sys.stderr)
        self._stack.callback(contestant.close)
        try:
            contestant.install()
        except Failed as error:
            self.failed[contestant.name] = str(error)
        else:
            self.contestants[contestant.name] = contestant

    def measure(self, cases: dict[str, Case]) -> dict[str, list[Any]]:
        """Return what each case came to in each round; a case that fails is noted and left out from then on."""
        found: dict[str, list[Any]] = {name: [] for name in cases}
        for number in range(1, self.rounds + 1):
            for name in random.sample(sorted(cases), len(cases)):
                if name in self.failed:
                    continue
                print(f"round {number}: {name}", end="", flush=True, file=sys.stderr)
                try:
                    found[name].append(cases[name]())
                    print(f" {found[name][-1]}"[:60], file=sys.stderr)
                except (Failed, psycopg.Error) as error:
                    self.failed[name] = str(error).splitlines()[0]
                    print(" failed", file=sys.stderr)
        return {name: values for name, values in found.items() if name not in self.failed}

    def medians(self, cases: dict[str, Case]) -> dict[str, float]:
        """Return the median of each case."""
        return {name: statistics.median(values) for name, values in self.measure(cases).items()}

    def heading(self) -> str:
        """Say when, on what and with what this was measured."""
        server = self.testbed.value("SHOW server_version")
        versions = filter(None, (each.version() for each in self.contestants.values()))
        return (
            f"{date.today():%d %B %Y}, {os.cpu_count()} cores ({platform.machine()}), Python "
            f"{platform.python_version()}, PostgreSQL {server} with fsync on; {', '.join(versions)}; "
            f"medians of {self.rounds} rounds."
        )
