from importlib import import_module

from django.contrib.postgres.operations import ValidateConstraint
from django.db import migrations

from django_pglock.migrations._operations import ChangeRows

NEAREST_DATES = import_module("django_pglock.migrations.0012_readable_run_after").NEAREST_DATES


class Migration(migrations.Migration):
    dependencies = [("django_pglock", "0012_readable_run_after")]

    operations = [
        # Rows that were written between the two operations of the migration before.
        ChangeRows("task", NEAREST_DATES),
        ValidateConstraint("task", "pglock_task_run_after"),
    ]
