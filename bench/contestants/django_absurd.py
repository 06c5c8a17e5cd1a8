"""django-absurd, whose worker claims a hundred tasks at once, which is four times as fast as its default of one.

It has no call for many tasks; one transaction is the next best.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.contestants import django_project
from bench.contestants.base import main


class DjangoAbsurd(django_project.DjangoContestant):
    name = "django-absurd"
    packages = ("django-absurd==1.0.1", "absurd-sdk==0.5.1", "django", "psycopg[binary]")
    worker_name = "absurd_worker"
    slowness = 30
    unfinished = (
        "SELECT FROM absurd.t_default WHERE state IN ('pending', 'running', 'sleeping') AND task_name LIKE '%%.' || %s"
    )

    def worker(self, *options: str) -> Sequence[str]:
        return [*super().worker("--batch-size", "100"), *(["--concurrency", *options] if options else [])]


if __name__ == "__main__":
    django_project.begin()
    main(setup=django_project.setup, one=django_project.one, many=django_project.many_in_one_transaction)
