from django.db import migrations, models

from django_pglock.migrations._operations import PartitionTable


class Migration(migrations.Migration):
    dependencies = [("django_pglock", "0010_shared_failures")]

    operations = [
        migrations.CreateModel(
            name="ArchivedTask",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False, verbose_name="id")),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("SCHEDULED", "Scheduled"),
                            ("BLOCKED", "Blocked"),
                            ("READY", "Ready"),
                            ("RUNNING", "Running"),
                            ("SUCCESSFUL", "Successful"),
                            ("FAILED", "Failed"),
                            ("CANCELLED", "Cancelled"),
                        ],
                        max_length=16,
                        verbose_name="status",
                    ),
                ),
                ("queue", models.CharField(max_length=128, verbose_name="queue")),
                ("priority", models.SmallIntegerField(verbose_name="priority")),
                ("task_path", models.CharField(max_length=512, verbose_name="task function")),
                ("args", models.JSONField(verbose_name="arguments")),
                ("kwargs", models.JSONField(verbose_name="keyword arguments")),
                ("backend", models.CharField(max_length=64, verbose_name="backend")),
                ("retries", models.SmallIntegerField(verbose_name="retries")),
                ("max_retries", models.SmallIntegerField(verbose_name="maximum retries")),
                ("attempts", models.IntegerField(verbose_name="attempts")),
                ("uncounted", models.IntegerField(verbose_name="uncounted claims")),
                ("rescues", models.SmallIntegerField(verbose_name="rescues")),
                ("worker", models.UUIDField(null=True, verbose_name="worker")),
                ("lock_key", models.CharField(max_length=512, null=True, verbose_name="lock key")),
                ("concurrency", models.SmallIntegerField(null=True, verbose_name="concurrency")),
                ("group_key", models.CharField(max_length=512, null=True, verbose_name="group key")),
                ("fair_key", models.CharField(max_length=512, null=True, verbose_name="fair key")),
                ("unique_key", models.CharField(max_length=512, null=True, verbose_name="unique key")),
                ("cancel_requested_at", models.DateTimeField(null=True, verbose_name="cancel requested at")),
                ("run_after", models.DateTimeField(null=True, verbose_name="run after")),
                ("enqueued_at", models.DateTimeField(verbose_name="enqueued at")),
                ("started_at", models.DateTimeField(null=True, verbose_name="started at")),
                ("last_attempted_at", models.DateTimeField(null=True, verbose_name="last attempted at")),
                ("finished_at", models.DateTimeField(verbose_name="finished at")),
                ("progress", models.JSONField(null=True, verbose_name="progress")),
                ("result", models.JSONField(null=True, verbose_name="result")),
                ("log", models.TextField(null=True, verbose_name="log")),
                ("meta", models.JSONField(verbose_name="meta")),
                (
                    "failed_attempts",
                    models.JSONField(
                        help_text="The attempts before the one that succeeded, in order.",
                        null=True,
                        verbose_name="failed and lost attempts",
                    ),
                ),
            ],
            options={
                "verbose_name": "archived task",
                "verbose_name_plural": "archived tasks",
                "ordering": ["-id"],
                "default_permissions": (),
                "required_db_features": (
                    "supports_covering_indexes",
                    "supports_expression_defaults",
                    "supports_json_field",
                    "supports_partial_indexes",
                    "supports_table_check_constraints",
                ),
                "required_db_vendor": "postgresql",
            },
            managers=[("for_dumpdata", models.Manager())],
        ),
        PartitionTable("archivedtask", "finished_at"),
    ]
