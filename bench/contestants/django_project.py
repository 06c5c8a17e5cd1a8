"""What the contestants have in common that are Django apps: the project in ``bench/app``."""

from __future__ import annotations

from typing import Any

from bench.contestants.base import Contestant, repeat


class DjangoContestant(Contestant):
    """Its worker is a management command."""

    worker_name = ""

    @property
    def environment(self) -> dict[str, str]:
        return {"DJANGO_SETTINGS_MODULE": "bench.app.settings", "BENCH_CONTESTANT": self.key}

    def worker(self, *options: str) -> list[str]:
        return [self.python, "-m", "django", self.worker_name, *options]


def begin() -> None:
    """Start Django."""
    import django

    django.setup()


def setup() -> None:
    """Make all tables."""
    from django.core.management import call_command

    call_command("migrate", run_syncdb=True, verbosity=0)


def function(name: str) -> Any:
    """Return a task function of the project."""
    from bench.app import tasks

    return getattr(tasks, name)


def one(name: str, *arguments: Any) -> None:
    """Enqueue one call."""
    function(name).enqueue(*arguments)


def many_in_one_transaction(count: int, name: str, *arguments: Any) -> None:
    """Enqueue many calls where there is no call for many."""
    from django.db import transaction

    with transaction.atomic():
        repeat(count, lambda: one(name, *arguments))
