from importlib import import_module

from django.contrib.postgres.operations import ValidateConstraint
from django.db import migrations

from django_pglock.migrations._operations import ChangeRows

COMPLY = import_module("tests.sample.online_migrations.9005_check").COMPLY


class Migration(migrations.Migration):
    """The constraint for all rows."""

    dependencies = [("django_pglock", "9005_check")]
    operations = [
        # Rows that were written between the two operations of the migration before.
        ChangeRows("task", COMPLY),
        ValidateConstraint("task", "online_check"),
    ]
