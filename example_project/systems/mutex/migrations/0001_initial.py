"""The table of this system."""

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="TaskState",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("queue", models.TextField(db_default="default")),
                ("name", models.TextField()),
                (
                    "status",
                    models.TextField(
                        choices=[
                            ("new", "New"),
                            ("in_progress", "In Progress"),
                            ("failed", "Failed"),
                            ("expired", "Expired"),
                            ("done", "Done"),
                        ],
                        db_default="new",
                    ),
                ),
                ("owner", models.TextField(null=True)),
                ("token", models.BigIntegerField(db_default=0, help_text="Counts how often the row was taken.")),
                ("retries_left", models.PositiveIntegerField(help_text="NULL: no limit.", null=True)),
                (
                    "expires_at",
                    models.DateTimeField(help_text="When the time in the status is over. NULL: never.", null=True),
                ),
            ],
            options={
                "db_table": "task_state",
                "indexes": [
                    models.Index(
                        condition=models.Q(("status__in", ["new", "failed", "expired"])),
                        fields=["queue", "id"],
                        name="task_state_free",
                    ),
                    models.Index(
                        condition=models.Q(("expires_at__isnull", False)),
                        fields=["expires_at"],
                        name="task_state_timed",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("queue", "name"), name="task_state_unique_in_queue"),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("owner__isnull", False), ("status", "in_progress")),
                            models.Q(
                                models.Q(("status", "in_progress"), _negated=True),
                                ("owner__isnull", True),
                            ),
                            _connector="OR",
                        ),
                        name="task_state_held_by_an_owner",
                    ),
                ],
            },
        ),
    ]
