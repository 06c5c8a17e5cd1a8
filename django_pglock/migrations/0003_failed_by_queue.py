from django.db import migrations, models

from django_pglock.migrations._operations import AddIndexOnline


class Migration(migrations.Migration):
    # CREATE INDEX CONCURRENTLY does not run in a transaction.
    atomic = False

    dependencies = [("django_pglock", "0002_failed_by_function")]

    operations = [
        AddIndexOnline(
            "task",
            models.Index(fields=["queue", "id"], name="pglock_task_failed_queue", condition=models.Q(status="FAILED")),
        )
    ]
