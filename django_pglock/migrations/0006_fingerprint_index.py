from django.db import migrations, models

from django_pglock.migrations._operations import AddIndexOnline


class Migration(migrations.Migration):
    # CREATE INDEX CONCURRENTLY does not run in a transaction.
    atomic = False

    dependencies = [("django_pglock", "0005_fingerprint")]

    operations = [
        AddIndexOnline(
            "task",
            models.Index(
                fields=["fingerprint", "id"],
                include=["finished_at"],
                name="pglock_task_fingerprint",
                condition=models.Q(status="FAILED"),
            ),
        )
    ]
