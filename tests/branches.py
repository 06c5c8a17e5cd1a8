"""A pytest plugin that measures which branches of the package the tests take: ``-p tests.branches``.

It measures by SlipCover, in the process of the tests only, with all tests and all of their parameters. SlipCover puts
its probes into the code of a module at the import, so measuring costs a few per cent. coverage has a function called
for each line: measuring takes two thirds as long as the test itself. ``tox -e coverage`` measures by it, and worker
processes, too.

Each process of tests writes a file into the folder that ``PGLOCK_BRANCHES`` names. ``python -m slipcover --merge``
makes one of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from slipcover import Slipcover
from slipcover.importer import SlipcoverLoader

PACKAGE = "django_pglock"
#: So many misses of probes until SlipCover takes probes out of functions that may run in other threads: never.
NEVER = 1 << 30
measurement = Slipcover(branch=True, d_miss_threshold=NEVER)


class Finder(MetaPathFinder):
    """Finds the modules of the package. The finder of SlipCover leaves out what pytest would rewrite, such as these."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.partition(".")[0] == PACKAGE else None
        if spec is not None and spec.origin is not None and spec.loader is not None:
            spec.loader = SlipcoverLoader(measurement, spec.loader, spec.origin)
        return spec


def pytest_unconfigure() -> None:
    folder = Path(os.environ["PGLOCK_BRANCHES"])
    (folder / f"{os.getpid()}.json").write_text(json.dumps(measurement.get_coverage()))


# The package is imported while tests are collected, so this begins before.
assert PACKAGE not in sys.modules, "the package was imported before it could be measured"
sys.meta_path.insert(0, Finder())
