"""A pytest plugin that notes which branches of the package the tests take: ``-p tests.branches``.

A branch is the body of a function, loop, ``if``, ``else``, ``case`` or ``except``, and also the ``else`` that an ``if``
or a loop does not have. When a module of the package is imported, each of its branches gets a mark: a first statement
that stores the number of the branch in a dictionary. A mark costs so little that all tests in the process of the tests
are measured, with all their parameters. coverage has a function called for each line, which takes two thirds as long
as the test itself; ``tox -e coverage`` measures by it, and worker processes, too. A mark takes no lock, so a thread may
be interrupted at it.

Each process of tests writes a file into the folder that ``PGLOCK_BRANCHES`` names. ``python -m tests.branches 90``
reads all these files, names the branches that were not taken, and fails if fewer than 90 per cent of all were taken.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

PACKAGE = Path(__file__).resolve().parent.parent / "django_pglock"
#: tests/foreign runs these, in an environment that has what they import.
ELSEWHERE = {PACKAGE / "contrib" / f"{name}.py" for name in ("opentelemetry", "prometheus", "sentry")}
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path not in ELSEWHERE and "migrations" not in path.parts]
FOLDER = Path(os.environ["PGLOCK_BRANCHES"])
#: The name that the dictionary has in each module.
TAKEN = "__taken__"
#: What was taken, by the path of the file.
taken: dict[str, dict[int, bool]] = {}


def branches(tree: ast.Module) -> Iterator[tuple[int, list[ast.stmt]]]:
    """Yield the line and the statements of each branch, always in the same order."""
    # Marks that the caller adds do not count.
    for node in [*ast.walk(tree)]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ExceptHandler, ast.match_case)):
            yield from branch(node.body)
        elif isinstance(node, (ast.If, ast.While, ast.For, ast.AsyncFor)) and not is_for_types(node):
            yield from branch(node.body)
            if not (isinstance(node, ast.While) and isinstance(node.test, ast.Constant)):
                yield (node.orelse[0] if node.orelse else node).lineno, node.orelse


def branch(body: list[ast.stmt]) -> Iterator[tuple[int, list[ast.stmt]]]:
    if not all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in body):
        yield body[0].lineno, body


def is_for_types(node: ast.stmt) -> bool:
    """Return whether this is ``if TYPE_CHECKING:``."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def marked(source: bytes) -> ast.Module:
    """Return the module with a mark in each of its branches."""
    tree = ast.parse(source)
    for number, (line, statements) in enumerate([*branches(tree)]):
        [mark] = ast.parse(f"{TAKEN}[{number}] = True").body
        for node in ast.walk(mark):
            ast.copy_location(node, ast.Constant(0, lineno=line, col_offset=0, end_lineno=line, end_col_offset=0))
        # A docstring stays the first statement.
        has_docstring = (
            statements and isinstance(statements[0], ast.Expr) and isinstance(statements[0].value, ast.Constant)
        )
        statements.insert(1 if has_docstring else 0, mark)
    return tree


class MarkingLoader(SourceFileLoader):
    """Loads a module with its marks."""

    def get_code(self, fullname: str) -> CodeType:
        # Python's own cache of compiled code has code without marks.
        return compile(marked(self.get_data(self.path)), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, TAKEN, taken.setdefault(self.path, {}))
        super().exec_module(module)


class MarkingFinder(MetaPathFinder):
    """Finds the modules of the package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.partition(".")[0] == PACKAGE.name else None
        if spec is not None and spec.origin is not None and Path(spec.origin) in SOURCES:
            spec.loader = MarkingLoader(name, spec.origin)
        return spec


def pytest_unconfigure() -> None:
    numbers = {str(Path(path).relative_to(PACKAGE)): sorted(marks) for path, marks in taken.items()}
    (FOLDER / f"{os.getpid()}.json").write_text(json.dumps(numbers))


def main(floor: float) -> None:
    """Print what was not taken; end with an error where less was taken than the floor, in per cent."""
    files = [json.loads(path.read_text()) for path in FOLDER.glob("*.json")]
    of_all = of_taken = 0
    for path in SOURCES:
        name = str(path.relative_to(PACKAGE))
        lines = [line for line, _ in branches(ast.parse(path.read_bytes()))]
        numbers = {number for each in files for number in each.get(name, [])}
        of_all += len(lines)
        of_taken += len(numbers)
        if missing := sorted(line for number, line in enumerate(lines) if number not in numbers):
            print(f"{name}: of {len(lines)} branches not taken are those at {', '.join(map(str, missing))}")
    percent = 100 * of_taken / of_all
    print(f"{of_taken} of {of_all} branches were taken, {percent:.1f} per cent")
    sys.exit(percent < floor)


if __name__ == "__main__":
    main(float(sys.argv[1]))
else:
    # The package is imported while tests are collected, so this begins before.
    assert PACKAGE.name not in sys.modules, "the package was imported before its branches could be marked"
    sys.meta_path.insert(0, MarkingFinder())
