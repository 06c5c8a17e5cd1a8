from datetime import datetime, timezone

from django.db import migrations, models

from django_pglock.migrations._operations import AddCheckOnline, ChangeRows

#: A program without Django may have written 'infinity', or a date so far away that Python does not have it.
NEAREST_DATES = """
UPDATE "django_pglock_task"
SET run_after = LEAST(GREATEST(run_after, '0001-01-02 00:00:00+00'), '9999-12-30 00:00:00+00')
WHERE run_after NOT BETWEEN '0001-01-02 00:00:00+00' AND '9999-12-30 00:00:00+00'
"""


class Migration(migrations.Migration):
    dependencies = [("django_pglock", "0011_archived_task")]

    operations = [
        ChangeRows("task", NEAREST_DATES),
        AddCheckOnline(
            "task",
            models.CheckConstraint(
                condition=models.Q(
                    run_after__range=(
                        datetime(1, 1, 2, tzinfo=timezone.utc),
                        datetime(9999, 12, 30, tzinfo=timezone.utc),
                    )
                ),
                name="pglock_task_run_after",
            ),
        ),
    ]
