"""django-ox, with its default worker."""

from __future__ import annotations

from typing import Any

from bench.contestants import django_project
from bench.contestants.base import main


class DjangoOx(django_project.DjangoContestant):
    name = "django-ox"
    packages = ("django-ox", "django", "psycopg[binary]")
    worker_name = "ox_worker"
    slowness = 30
    unfinished = "SELECT FROM django_ox_oxtask WHERE status <> 'SUCCESSFUL' AND task_path LIKE '%%.' || %s"


def many(count: int, function: str, *arguments: Any) -> None:
    from django_ox.bulk import enqueue_many

    enqueue_many(django_project.function(function), [(arguments, {})] * count)


if __name__ == "__main__":
    django_project.begin()
    main(setup=django_project.setup, one=django_project.one, many=many)
