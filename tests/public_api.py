"""The names that a release promises, one a line. ``public_api.txt`` is their recorded list.

``.venv/bin/python -m tests.public_api`` records it anew. What such a change means for users is in docs/reference.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

RECORDED = Path(__file__).parent / "public_api.txt"
COMMANDS = ("locks", "locktasks", "runlockworker", "withlock")
EXT = Path(__file__).resolve().parents[1] / "docs" / "_ext"


def names() -> list[str]:
    """Return the names that users write: of the package, and of what the reference prints from the code."""
    return sorted(f"{kind} {name}" for kind, name in _names())


def _names() -> Iterator[tuple[str, str]]:
    from django.apps import apps
    from django.dispatch import Signal

    import django_pglock
    from django_pglock import errors, signals, testing

    sys.path.insert(0, str(EXT))
    import code_facts

    yield from (("name", each) for each in django_pglock.__all__)
    yield from (("error", name) for name, each in vars(errors).items() if _is_error(each))
    yield from (("testing", each) for each in testing.__all__)
    yield from (("signal", name) for name, each in vars(signals).items() if isinstance(each, Signal))
    yield from (("context", name) for name in vars(django_pglock.TaskContext) if not name.startswith("_"))
    yield from (("option", term.partition(" ")[0]) for term, _ in code_facts.options())
    yield from (("setting", term.partition(" ")[0]) for term, _ in code_facts.settings())
    yield from (("check", number) for number, _ in code_facts.checks())
    yield from (("metric", term) for term, _ in code_facts.metrics())
    for command in COMMANDS:
        yield from (("command", f"{command} {term}") for term, _ in code_facts.arguments(command)[1])
    for model in apps.get_app_config("django_pglock").get_models():
        yield from (("column", f"{model.__name__}.{name}") for name, _ in code_facts.columns(model))


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == "django_pglock.errors"


if __name__ == "__main__":
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    RECORDED.write_text("\n".join(names()) + "\n")
