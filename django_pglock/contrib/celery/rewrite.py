"""Rewrites the source of a project: imports to the bridge, and simple tasks with their calls to ``@task``.

A task is simple if its options have the same meaning here, if it returns nothing, and if each use of its name in the
project is a call of ``delay()`` whose result is not used, with arguments that are certain to be JSON. All others stay
with the bridge.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Collection, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from django_pglock.contrib.celery.app import MODULES

#: Options under their names here, and those that change nothing for a task that calls no ``retry()``.
SAME = {
    "queue": "queue_name",
    "priority": "priority",
    "expires": "expires",
    "rate_limit": "rate",
    "time_limit": "timeout",
}
NO_EFFECT = {"acks_late", "track_started", "ignore_result", "max_retries", "default_retry_delay"}
#: What is replaced: line, column, last line, column behind it, and the new text. Columns are bytes, as in ``ast``.
Edit = tuple[int, int, int, int, str]


def rewrite(files: dict[Path, str]) -> None:
    """Show what would change, and write it if a person says so."""
    new = {path: edited(files[path], edits) for path, edits in edits_of(files).items() if edits}
    for path, text in new.items():
        before, after = (each.splitlines(keepends=True) for each in (files[path], text))
        sys.stdout.writelines(difflib.unified_diff(before, after, str(path), str(path)))
    if new and input(f"Write {len(new)} files? [y/N] ").strip().lower() == "y":
        for path, text in new.items():
            path.write_text(text)


def edits_of(files: dict[Path, str]) -> dict[Path, list[Edit]]:
    """Return the edits of each file."""
    trees = {path: ast.parse(text) for path, text in files.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    calls = _certain_calls(nodes)
    simple = {task.name for tree in trees.values() for task in _simple_tasks(tree, nodes, calls)}
    return {path: [*_edits(tree, simple, calls)] for path, tree in trees.items()}


def edited(text: str, edits: list[Edit]) -> str:
    """Return a text with edits, which do not overlap."""
    data = text.encode()
    starts = [0, 0, *accumulate(map(len, data.splitlines(keepends=True)))]
    for line, column, last, end, new in sorted(edits, reverse=True):
        data = data[: starts[line] + column] + new.encode() + data[starts[last] + end :]
    return data.decode()


def _certain_calls(nodes: list[Any]) -> list[ast.Call]:
    """Return the calls of ``delay()``, outside of coroutines, whose result is not used, with certain arguments."""
    has_uuids = any(name_of(node) == "UUIDField" for node in nodes)
    in_coroutines = {each for node in nodes if isinstance(node, ast.AsyncFunctionDef) for each in ast.walk(node)}
    values = [
        node.value if isinstance(node, ast.Expr) else node.body
        for node in nodes
        if type(node) in (ast.Expr, ast.Lambda)
    ]
    return [
        each
        for each in values
        if isinstance(each, ast.Call) and name_of(each) == "delay" and each not in in_coroutines
        if all(_is_certain(value, has_uuids) for value in (*each.args, *(keyword.value for keyword in each.keywords)))
    ]


def _is_certain(value: Any, has_uuids: bool) -> bool:
    """Return whether a value is certain to be JSON: a constant, a text, a number, or the id of a row."""
    if isinstance(value, (ast.List, ast.Tuple)):
        return all(_is_certain(each, has_uuids) for each in value.elts)
    if isinstance(value, ast.Call):
        return getattr(value.func, "id", "") in ("str", "int", "len", "bool")
    is_id = not has_uuids and re.fullmatch(r"(.*_)?(id|pk)", name_of(value))
    is_constant = isinstance(value, ast.Constant) and not isinstance(value.value, bytes)
    return bool(is_id or is_constant or isinstance(value, ast.JoinedStr))


def _simple_tasks(tree: ast.Module, nodes: list[Any], calls: list[ast.Call]) -> Iterator[ast.FunctionDef]:
    # A project's own name "task" would be another one.
    if any(isinstance(node, ast.Name) and node.id == "task" for node in ast.walk(tree)):
        return
    names = [name_of(node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))]
    texts = " ".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and new_decorator(node):
            called = sum(_task_of(call) == node.name for call in calls)
            # A text may be the target of a mock.
            if names.count(node.name) == called and not re.search(rf"\b{node.name}\b", texts):
                yield node


def new_decorator(function: ast.FunctionDef) -> str | None:
    """Return ``@task`` for the decorator of a function; None if that is not certain."""
    returns = any(isinstance(node, ast.Return) and node.value for node in ast.walk(function))
    decorator: Any = function.decorator_list[0] if len(function.decorator_list) == 1 else None
    is_called = isinstance(decorator, ast.Call)
    if returns or name_of(decorator) != "shared_task" or (is_called and decorator.args):
        return None
    given = {each.arg: ast.unparse(each.value) for each in decorator.keywords} if is_called else {}
    words = {SAME[name]: given.pop(name) for name in list(given) if name in SAME}
    if "autoretry_for" in given and given.get("max_retries", "3").isdecimal():
        words |= {"retry_on": given.pop("autoretry_for"), "max_attempts": f"{int(given.get('max_retries', 3)) + 1}"}
        # The default here is Celery's back-off with jitter.
        words |= {} if given.get("retry_backoff") else {"backoff": given.get("default_retry_delay", "180")}
        given = {name: value for name, value in given.items() if (name, value) != ("retry_backoff", "True")}
    if given.keys() - NO_EFFECT:
        return None
    return f"task({', '.join(f'{name}={value}' for name, value in words.items())})" if words else "task"


def _edits(tree: ast.Module, simple: Collection[str], calls: list[ast.Call]) -> Iterator[Edit]:
    """Yield the edits of one file: its decorators, calls and imports."""
    moved = 0
    decorators = [name_of(each) for node in ast.walk(tree) for each in getattr(node, "decorator_list", ())]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in simple and (new := new_decorator(node)):
            moved += 1
            yield _over(node.decorator_list[0], new)
        if node in calls and _task_of(node) in simple:
            yield _over(node.func, f"{ast.unparse(node.func.value)}.enqueue")  # type: ignore[attr-defined]
    for each in tree.body:
        if isinstance(each, ast.ImportFrom) and each.module in MODULES:
            names = ast.unparse(each).partition(" import ")[2]
            bridge = f"from django_pglock.contrib.celery{MODULES[each.module].replace('.app', '')} import {names}"
            lines = [] if names == "shared_task" and moved == decorators.count("shared_task") else [bridge]
            lines += ["from django_pglock import task"] if moved and "shared_task" in names else []
            yield _over(each, "\n".join(lines))


def _over(node: Any, text: str) -> Edit:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, text


def name_of(node: Any) -> str:
    """Return the last name of what is called, decorated or referred to; an empty text for anything else."""
    node = node.func if isinstance(node, ast.Call) else node
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _task_of(call: Any) -> str:
    """Return the name of the task in ``send.delay(…)`` or ``tasks.send.delay(…)``."""
    return name_of(getattr(call.func, "value", None))
