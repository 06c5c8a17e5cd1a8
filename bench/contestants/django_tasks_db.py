"""django-tasks-db, with its default worker. It has no call for many tasks; one transaction is the next best."""

from __future__ import annotations

from bench.contestants import django_project
from bench.contestants.base import main


class DjangoTasksDb(django_project.DjangoContestant):
    name = "django-tasks-db"
    packages = ("django-tasks-db", "django", "psycopg[binary]")
    worker_name = "db_worker"
    slowness = 30
    unfinished = (
        "SELECT FROM django_tasks_database_dbtaskresult WHERE status <> 'SUCCESSFUL' AND task_path LIKE '%%.' || %s"
    )


if __name__ == "__main__":
    django_project.begin()
    main(setup=django_project.setup, one=django_project.one, many=django_project.many_in_one_transaction)
