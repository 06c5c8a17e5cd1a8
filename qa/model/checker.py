"""The models of this folder, and their results in SPIN."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent
#: Files that the models include.
SHARED = {"common.pml"}
FAULT = re.compile(r"^#define (\w+) \(planted == (\d+)\) /\* finds (!?\w+): (.+?) \*/$", re.MULTILINE)
#: In the search of all states each model is larger than in the search of endless runs, which takes longer.
LARGER = {
    "fence": ("-DWORKERS=3", "-DFAULTS=3"),
    "groups": ("-DTASKS=3",),
    "heartbeats": ("-DFAULTS=3",),
    "keys": ("-DTASKS=3", "-DFAULTS=1"),
    "leases": ("-DFAULTS=2",),
    "steps": ("-DFAULTS=4",),
    "wake": ("-DTASKS=3",),
}
#: Steps of the longest run, and the size of the table of states as a power of two.
SEARCH = ["-m100000", "-w20"]
#: Processes of a model, as far as SPIN's counters of fairness reach.
FAIRNESS = 5


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted, and what finds it: a flag that must never be set ("!flag"), or a property."""

    name: str
    number: int
    finds: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """The result of one search. ``violation`` is None, "!flag" or the property that does not hold."""

    violation: str | None
    states: int
    unreached: list[str]
    output: str


class Model:
    """A file of this folder."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = (FOLDER / f"{name}.pml").read_text()
        self.faults = [Fault(fault, int(number), *rest) for fault, number, *rest in FAULT.findall(self.text)]
        self.properties = re.findall(r"^ltl (\w+)", self.text, re.MULTILINE)

    def never(self, *, planted: int = 0) -> Verdict:
        """Search all states for a forbidden one."""
        return _verdict(_run(_built(self.name, LARGER[self.name], "-DNOCLAIM", "-DSAFETY"), planted=planted))

    def always(self, wanted: str, *, planted: int = 0) -> Verdict:
        """Search for a run without end in which a property does not hold, although no process is held up forever."""
        program = _built(self.name, (), f"-DNFAIR={FAIRNESS}")
        return _verdict(_run(program, "-a", "-f", "-N", wanted, planted=planted), wanted)

    def with_fault(self, fault: Fault) -> Verdict:
        """Search for what the fault should be found by."""
        if fault.finds.startswith("!"):
            return self.never(planted=fault.number)
        return self.always(fault.finds, planted=fault.number)


def models() -> list[Model]:
    """Return all models, by name."""
    return [Model(path.stem) for path in sorted(FOLDER.glob("*.pml")) if path.name not in SHARED]


@lru_cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="pglock-model-")


@cache
def _built(name: str, defines: Sequence[str], *options: str) -> Path:
    """Return the program that searches a model: SPIN writes it in C."""
    folder = Path(_folder().name) / str(_built.cache_info().misses)
    shutil.copytree(FOLDER, folder, ignore=lambda _, names: [each for each in names if not each.endswith(".pml")])
    for command in (["spin", "-a", *defines, f"{name}.pml"], ["gcc", "-Og", "-w", *options, "-o", "search", "pan.c"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return folder / "search"


def _run(program: Path, *options: str, planted: int = 0) -> str:
    environment = {**os.environ, "PLANTED": str(planted)}
    command = [program, *SEARCH, *options]
    done = subprocess.run(command, cwd=program.parent, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert "errors: " in output, output
    assert "max search depth too small" not in output, output
    assert "out of memory" not in output, output
    return output


def _verdict(output: str, wanted: str | None = None) -> Verdict:
    violation = None
    if flag := re.search(r"assertion violated +!\((\w+)\)", output):
        violation = f"!{flag[1]}"
    elif "acceptance cycle (at" in output:
        violation = wanted
    assert (violation is None) == ("errors: 0" in output), output
    states = int(re.findall(r"^ *(\d+) states, stored", output, re.MULTILINE)[0])
    unreached = re.findall(r'^\t(\w+\.pml:\d+, state \d+, "(?!-end-).*")$', output, re.MULTILINE)
    return Verdict(violation, states, unreached, output)
