"""What the reference says of the code: terms and their texts, in which double backticks mark code."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from django.core.management import BaseCommand, load_command_class

from django_pglock.conf import Settings
from django_pglock.store.count import QueueCounts
from django_pglock.store.numbers import Counts
from django_pglock.tasks.fields import OPTIONS, By, TaskFields
from django_pglock.worker.parent import probes as worker_metrics

PACKAGE = Path(__file__).resolve().parents[2] / "django_pglock"
WHO = {By.BOTH: "", By.FUNCTION: " Only @task.", By.CALL: " Only using()."}
Facts = Iterator[tuple[str, str]]


def settings() -> Facts:
    """Yield the options of DJANGO_PGLOCK with their defaults."""
    for option in fields(Settings):
        default = option.default if option.default is not MISSING else option.default_factory()  # type: ignore[misc]
        yield f"{option.name} = {default!r}", option.metadata["help"]


def options() -> Facts:
    """Yield the options of a task, with the sentences of the docstring and who may give them."""
    defaults = {each.name: each.default for each in fields(TaskFields)}
    bullets = re.findall(r"^ +- ``(\w+)``: (.+?)(?=^ +- |\Z)", TaskFields.__doc__ or "", re.MULTILINE | re.DOTALL)
    for name, text in bullets:
        default = repr(defaults[name])
        # What a docstring says of the others is shorter than they are.
        is_short = len(default) < 20 and default not in ("None", "()")
        said = " ".join((text[0].upper() + text[1:]).split())
        yield f"{name} = {default}" if is_short else name, f"{said}{WHO[OPTIONS[name].by]}"


def columns(model: Any) -> Facts:
    """Yield the columns of a model."""
    for field in model._meta.fields:
        kind = field.get_internal_type().removesuffix("Field")
        text = str(field.help_text) or f"{str(field.verbose_name).capitalize()}."
        choices = ", ".join(f"``{value}``" for value, _ in field.choices or ())
        one_of = f" One of {choices}." if choices else ""
        yield field.column, f"{kind}{', may be empty' if field.null else ''}. {text}{one_of}"


def arguments(name: str) -> tuple[str, Facts]:
    """Return what a command does, and its arguments and subcommands, without those that every command has."""
    app, _, command = f"django_pglock.{name}".rpartition(".")
    parser = load_command_class(app, command).create_parser("manage.py", command)
    of_django = {each.dest for each in BaseCommand().create_parser("manage.py", "any")._actions}
    own = [each for each in parser._actions if each.dest not in of_django]
    return str(parser.description), (_argument(each) for action in own for each in _subcommands(action))


def _subcommands(action: Any) -> list[argparse.Action]:
    return list(action._choices_actions) if isinstance(action, argparse._SubParsersAction) else [action]


def _argument(action: argparse.Action) -> tuple[str, str]:
    value = "" if action.nargs == 0 and action.option_strings else str(action.metavar or action.dest.upper())
    return " ".join(filter(None, [", ".join(action.option_strings), value])), str(action.help or "")


def metrics() -> Facts:
    """Yield the metrics of a worker with their labels and types."""
    health = MagicMock()
    health.beat_age.return_value = 1.0
    queue = MagicMock(spec=QueueCounts, queue="default", oldest_ready=0.0, paused_at=None)
    queue.counts = dict.fromkeys(worker_metrics.COUNTED, 0)
    attempts = worker_metrics.attempt_families({("default", "shop.tasks.send"): Counts()})
    for family in (*worker_metrics.gauges(health), *worker_metrics.depth_families([queue]), *attempts):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = f"{worker_metrics.PREFIX}{family.name}"
        term = f"{name}{{{','.join(sorted(labels))}}}" if labels else name
        yield term, f"{family.kind.capitalize()}. {family.text}"


def checks() -> Facts:
    """Yield the system checks: the id of each with the message and the hint in the code."""
    found = {}
    for source in (path.read_text() for path in PACKAGE.rglob("*.py")):
        # A docstring stands for a check whose message is the error itself.
        found |= dict(re.findall(r'"""([EW]\d{3}): (.+?)(?:"""|$)', source))
        calls = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call)]
        for call in (each for each in calls if getattr(each.func, "id", "") == "problem"):
            number, *texts = map(_text, call.args)
            if re.fullmatch(r"[EW]\d{3}", number):
                found[number] = found.get(number, "…") if texts[0] == "…" else " ".join(texts)
    yield from ((f"django_pglock.{number}", text[0].upper() + text[1:]) for number, text in sorted(found.items()))


def _text(node: ast.AST) -> str:
    """Return a string of the code, with dots for what is filled in."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
