from django.db import migrations, models

from django_pglock.migrations._operations import AddIndexOnline
from tests.sample.online_migrations import LAST


class Migration(migrations.Migration):
    """An index of the table of tasks."""

    # CREATE INDEX CONCURRENTLY does not run in a transaction.
    atomic = False
    dependencies = [("django_pglock", LAST)]
    operations = [
        AddIndexOnline(
            "task",
            models.Index(
                fields=["task_path", "id"],
                include=["finished_at"],
                name="online_index",
                condition=models.Q(status="FAILED"),
            ),
        )
    ]
