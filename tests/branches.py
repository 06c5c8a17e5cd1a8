"""A pytest plugin that measures which branches of the package the tests take: ``-p tests.branches``.

It measures by SlipCover, in the process of the tests only, with all tests and all of their parameters. SlipCover puts
its probes into the code of a module at the import, so measuring costs a few per cent. coverage has a function called
for each line: measuring takes two thirds as long as the test itself. ``tox -e coverage`` measures by it, and worker
processes, too.

Each process of tests writes a file into the folder that ``PGLOCK_BRANCHES`` names. ``python -m slipcover --merge``
makes one of them. To put probes into all modules takes three seconds of CPU time. So the process that distributes the
tests to others (``-n 4``) measures nothing. Two thirds of the time are needed for what SlipCover finds in the source of
a module: the first process writes this into the same folder, and the others read it.
"""

from __future__ import annotations

import ast
import json
import marshal
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType

from slipcover import Slipcover
from slipcover.branch import preinstrument
from slipcover.importer import SlipcoverLoader

PACKAGE = "django_pglock"
#: So many misses of probes until SlipCover takes probes out of functions that may run in other threads: never.
NEVER = 1 << 30
RUNS_TESTS = "PYTEST_XDIST_WORKER" in os.environ or "-n" not in sys.argv
FOLDER = Path(os.environ["PGLOCK_BRANCHES"])
measurement = Slipcover(branch=True, d_miss_threshold=NEVER)


class Loader(SlipcoverLoader):
    """Puts probes into a module, as SlipCover's own loader does, but analyses its source once for all processes."""

    def exec_module(self, module: ModuleType) -> None:
        analysed = FOLDER / f"{module.__name__}.marshal"
        if not analysed.exists():
            beside = analysed.with_suffix(f".{os.getpid()}")
            beside.write_bytes(marshal.dumps(self._analyse()))
            # The file appears as a whole: other processes import the module at the same time.
            beside.rename(analysed)
            # Processes that tests start import the module without probes: this compiles it.
            self.orig_loader.get_code(module.__name__)
        code, lines, branches = marshal.loads(analysed.read_bytes())
        measurement.register_module(module)
        measurement.code_lines[code.co_filename].update(lines)
        measurement.code_branches[code.co_filename].update(branches)
        # With a parent SlipCover does not analyse the code again.
        exec(measurement.instrument(code, parent=code), module.__dict__)

    def _analyse(self) -> tuple[CodeType, list[int], list[tuple[int, int]]]:
        code = compile(preinstrument(ast.parse(self.origin.read_bytes())), str(self.origin), "exec")
        return code, list(Slipcover.lines_from_code(code)), list(Slipcover.branches_from_code(code))


class Finder(MetaPathFinder):
    """Finds the modules of the package. The finder of SlipCover leaves out what pytest would rewrite, such as these."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.partition(".")[0] == PACKAGE else None
        if spec is not None and spec.origin is not None and spec.loader is not None:
            spec.loader = Loader(measurement, spec.loader, spec.origin)
        return spec


def pytest_unconfigure() -> None:
    if RUNS_TESTS:
        (FOLDER / f"{os.getpid()}.json").write_text(json.dumps(measurement.get_coverage()))


# The package is imported while tests are collected, so this begins before.
assert PACKAGE not in sys.modules, "the package was imported before it could be measured"
if RUNS_TESTS:
    sys.meta_path.insert(0, Finder())
