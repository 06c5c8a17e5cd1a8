"""``python -m django_pglock.contrib.celery.check PATH``: what the bridge cannot carry, with file and line.

It reads the source of a project, and imports nothing of it. With ``--write`` it also rewrites what is certain.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django_pglock.contrib.celery.app import MODULES
from django_pglock.contrib.celery.options import AS_HERE, REFUSED
from django_pglock.contrib.celery.rewrite import name_of, rewrite

#: Packages and modules that have no equivalent, and what to write instead.
REFUSED_MODULES = {
    "celery.signals": "the signals of django.tasks, or a base= with hooks",
    "django_celery_beat": "rows of Schedule: manage.py celery_schedules makes them once",
    "django_celery_results": "rows of Task",
    "kombu": "nothing: there is no broker",
}
REFUSED_CALLS = ("add_periodic_task", "add_to_chord", "chunks", "send_event", "starmap")
DECORATORS = ("shared_task", "task")
SKIPPED = {".git", ".tox", ".venv", "node_modules", "site-packages", "venv"}


def sources(path: Path) -> dict[Path, str]:
    """Return the Python files of a path, without those of environments."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*.py") if not SKIPPED & {*each.parts})
    return {each: each.read_text() for each in files}


def findings(text: str) -> list[tuple[int, str]]:
    """Return what the bridge does not carry of a file, with the lines."""
    tree = ast.parse(text)
    found = [(call, f"{name_of(call)}() in a coroutine", "await sync_to_async(…)(…)") for call in coroutine_calls(tree)]
    found += [each for node in ast.walk(tree) for each in _refused(node)]
    return sorted((node.lineno, f"{what}: write {instead}") for node, what, instead in found)


def coroutine_calls(tree: ast.AST) -> list[ast.Call]:
    """Return the calls of ``delay()`` and ``apply_async()`` in coroutine functions, but not in functions in these."""
    calls = []
    parts: list[Any] = [part for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef) for part in node.body]
    while parts:
        part = parts.pop()
        if isinstance(part, ast.Call) and name_of(part) in ("delay", "apply_async"):
            calls.append(part)
        if not isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            parts += ast.iter_child_nodes(part)
    return calls


def _refused(node: Any) -> Iterator[tuple[Any, str, str]]:
    match node:
        case ast.ImportFrom(module=str(module)):
            yield from _modules(node, [module])
        case ast.Import():
            yield from _modules(node, [each.name for each in node.names])
        case ast.AsyncFunctionDef() if any(name_of(each) in DECORATORS for each in node.decorator_list):
            yield node, f"async def {node.name}", "@task of django_pglock, which runs coroutines"
        case ast.Call() if (name := name_of(node)) in (*DECORATORS, "apply_async"):
            given = {each.arg or "": each.value for each in node.keywords}
            yield from ((node, f"{each}= of {name}", REFUSED[each]) for each in given if _is_refused(each, given[each]))
        case ast.Call(func=ast.Attribute(attr=name, value=owner)) if name in REFUSED:
            if name in REFUSED_CALLS or name_of(owner) == "control":
                yield node, f"{name}()", REFUSED[name]
        case ast.Attribute(attr="on_after_configure" | "on_after_finalize" as name):
            yield node, name, REFUSED[name]
        case ast.Assign():
            for target in node.targets:
                yield from _assigned(node, name_of(target))


def _modules(node: Any, names: list[str]) -> Iterator[tuple[Any, str, str]]:
    for name in names:
        for module, instead in REFUSED_MODULES.items():
            if f"{name}.".startswith(f"{module}."):
                yield node, name, instead
        if name.startswith("celery.") and name not in (*MODULES, *REFUSED_MODULES):
            yield node, name, "@task, whose options and results are the package's own"


def _assigned(node: ast.Assign, name: str) -> Iterator[tuple[Any, str, str]]:
    setting = name.lower().removeprefix("celery_")
    is_setting = name.startswith("CELERY_") or name_of(getattr(node.targets[0], "value", None)) == "conf"
    if is_setting and _is_refused(setting, node.value):
        yield node, name, REFUSED[setting]
    if name.endswith("task_id") and name_of(node.value) == "UUIDField":
        yield node, f"{name} is a UUIDField", "BigIntegerField before a function moves to @task: its ids are numbers"


def _is_refused(name: str, value: Any) -> bool:
    is_as_here = isinstance(value, ast.Constant) and value.value in AS_HERE.get(name, ())
    return name in REFUSED and not is_as_here


def main(arguments: list[str] | None = None) -> int:
    """Print what is found. Returns 1 if there is anything."""
    parser = argparse.ArgumentParser(prog="python -m django_pglock.contrib.celery.check", description=__doc__)
    parser.add_argument("path", type=Path, help="a folder or a file")
    parser.add_argument("--write", action="store_true", help="rewrite what is certain, after it was shown")
    given = parser.parse_args(arguments)
    files = sources(given.path)
    lines = [f"{path}:{line}: {found}\n" for path, text in files.items() for line, found in findings(text)]
    sys.stdout.writelines(lines)
    sys.stdout.write(f"Places that the bridge cannot carry: {len(lines)}. Files: {len(files)}.\n")
    if given.write:
        rewrite(files)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
