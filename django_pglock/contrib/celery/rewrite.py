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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django_pglock.contrib.celery.app import MODULES

#: Options under their names here, and those that change nothing for a task that calls no ``retry()``.
SAME = {"queue": "queue_name", "rate_limit": "rate", "time_limit": "timeout"}
NO_EFFECT = {"acks_late", "track_started", "ignore_result", "max_retries", "default_retry_delay"}


def rewrite(files: dict[Path, str]) -> None:
    """Show what would change, and write it if a person says so."""
    new = {path: text for path, text in rewritten(files).items() if text != files[path]}
    for path, text in new.items():
        before, after = (each.splitlines(keepends=True) for each in (files[path], text))
        sys.stdout.writelines(difflib.unified_diff(before, after, str(path), str(path)))
    if new and input(f"Write {len(new)} files? [y/N] ").strip().lower() == "y":
        for path, text in new.items():
            path.write_text(text)


def rewritten(files: dict[Path, str]) -> dict[Path, str]:
    """Return the files with what is certain in new words."""
    trees = {path: ast.parse(text) for path, text in files.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    calls = _certain_calls(nodes)
    simple = {path: dict(_simple_tasks(tree, files[path], nodes, calls)) for path, tree in trees.items()}
    # Each use of such a name is a certain call.
    called = re.compile(rf"\b({'|'.join(name for tasks in simple.values() for _, name in tasks) or '(?!)'})\.delay\(")
    for path, tree in trees.items():
        text = _with_imports(tree, files[path], len(simple[path]))
        for (old, name), new in simple[path].items():
            text = text.replace(f"{old}\ndef {name}(", f"@{new}\ndef {name}(")
        files = {**files, path: called.sub(r"\1.enqueue(", text)}
    return files


def _with_imports(tree: ast.Module, text: str, moved: int) -> str:
    """Return a text with imports of the bridge, and of ``task`` if tasks have moved."""
    source = text
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = ast.unparse(node).partition(" import ")[2]
            lines = [f"from django_pglock.contrib.celery{MODULES[node.module].replace('.app', '')} import {names}"]
            lines += ["from django_pglock import task"] if moved and "shared_task" in names else []
            is_left = source.count("shared_task") > moved + 1 or names != "shared_task"
            text = text.replace(
                ast.get_source_segment(source, node) or "", "\n".join(lines if is_left else lines[1:]), 1
            )
    return text


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


def _simple_tasks(tree: ast.Module, text: str, nodes: list[Any], calls: list[ast.Call]) -> Iterator[Any]:
    """Yield the decorator and the name of each simple task of a file, with the new decorator."""
    # A project's own name "task" would be another one.
    if any(isinstance(node, ast.Name) and node.id == "task" for node in ast.walk(tree)):
        return
    names = [name_of(node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))]
    texts = " ".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (new := new_decorator(node)):
            called = sum(name_of(getattr(call.func, "value", None)) == node.name for call in calls)
            old = f"@{ast.get_source_segment(text, node.decorator_list[0])}"
            # A text may be the target of a mock.
            is_named = names.count(node.name) > called or re.search(rf"\b{node.name}\b", texts)
            if not is_named and f"{old}\ndef {node.name}(" in text:
                yield (old, node.name), new


def new_decorator(function: ast.FunctionDef) -> str | None:
    """Return ``@task`` for the decorator of a function; None if that is not certain."""
    returns = any(isinstance(node, ast.Return) and node.value for node in ast.walk(function))
    decorator: Any = function.decorator_list[0] if len(function.decorator_list) == 1 else None
    is_called = isinstance(decorator, ast.Call)
    if returns or name_of(decorator) != "shared_task" or (is_called and decorator.args):
        return None
    given = {each.arg: ast.unparse(each.value) for each in decorator.keywords} if is_called else {}
    if not re.fullmatch(r"'\d+/[smh]'", given.get("rate_limit", "'1/s'")):
        return None
    words = {SAME[name]: given.pop(name) for name in list(given) if name in SAME}
    if "autoretry_for" in given and given.get("max_retries", "3").isdecimal():
        words |= {"retry_on": given.pop("autoretry_for"), "max_attempts": f"{int(given.get('max_retries', 3)) + 1}"}
        # The default here is Celery's back-off with jitter.
        words |= {} if given.get("retry_backoff") else {"backoff": given.get("default_retry_delay", "180")}
        given = {name: value for name, value in given.items() if (name, value) != ("retry_backoff", "True")}
    if given.keys() - NO_EFFECT:
        return None
    return f"task({', '.join(f'{name}={value}' for name, value in words.items())})" if words else "task"


def name_of(node: Any) -> str:
    """Return the last name of what is called, decorated or referred to; an empty text for anything else."""
    node = node.func if isinstance(node, ast.Call) else node
    return str(getattr(node, "attr", getattr(node, "id", "")))
