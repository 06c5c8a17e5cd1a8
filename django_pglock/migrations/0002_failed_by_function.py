from django.db import migrations, models

from django_pglock.migrations._operations import AddIndexOnline


class Migration(migrations.Migration):
    # CREATE INDEX CONCURRENTLY does not run in a transaction.
    atomic = False

    dependencies = [("django_pglock", "0001_initial")]

    operations = [
        AddIndexOnline(
            "task",
            models.Index(
                fields=["task_path", "id"], name="pglock_task_failed_path", condition=models.Q(status="FAILED")
            ),
        )
    ]
