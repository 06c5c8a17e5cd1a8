from django.db import migrations, models

from django_pglock.migrations._operations import TableSQL
from django_pglock.models.counts import CountsField


class Migration(migrations.Migration):
    dependencies = [("django_pglock", "0003_failed_by_queue")]

    operations = [
        migrations.CreateModel(
            name="TaskHistory",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("seconds", models.IntegerField()),
                ("started_at", models.DateTimeField()),
                ("queue", models.CharField(blank=True, max_length=128)),
                ("task_path", models.CharField(blank=True, max_length=512)),
                ("succeeded", models.BigIntegerField()),
                ("failed", models.BigIntegerField()),
                ("retried", models.BigIntegerField()),
                ("cancelled", models.BigIntegerField()),
                ("snoozed", models.BigIntegerField()),
                ("lost", models.BigIntegerField()),
                ("wait_seconds", models.FloatField()),
                ("run_seconds", models.FloatField()),
                ("wait", CountsField()),
                ("run", CountsField()),
            ],
            options={
                "verbose_name": "history",
                "verbose_name_plural": "history",
                "default_permissions": ("view",),
                "required_db_features": (
                    "supports_expression_defaults",
                    "supports_json_field",
                    "supports_partial_indexes",
                    "supports_table_check_constraints",
                ),
                "required_db_vendor": "postgresql",
                "indexes": [models.Index(fields=["seconds", "started_at"], name="pglock_history_since")],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("seconds", "task_path", "queue", "started_at"), name="pglock_history_of"
                    )
                ],
            },
            managers=[("for_dumpdata", models.Manager())],
        ),
        migrations.CreateModel(
            name="QueueCount",
            fields=[
                ("queue", models.CharField(max_length=128, primary_key=True, serialize=False)),
                ("counted_at", models.DateTimeField()),
                ("count_again_at", models.DateTimeField(null=True)),
                ("ready", models.BigIntegerField()),
                ("blocked", models.BigIntegerField()),
                ("scheduled", models.BigIntegerField()),
                ("running", models.BigIntegerField()),
                ("failed", models.BigIntegerField()),
                ("oldest_ready", models.FloatField(null=True)),
                ("is_paused", models.BooleanField()),
            ],
            options={
                "verbose_name": "queue",
                "verbose_name_plural": "queues",
                "default_permissions": (),
                "required_db_features": (
                    "supports_expression_defaults",
                    "supports_json_field",
                    "supports_partial_indexes",
                    "supports_table_check_constraints",
                ),
                "required_db_vendor": "postgresql",
            },
            managers=[("for_dumpdata", models.Manager())],
        ),
        # Each worker updates the rows of the present hour every minute: in free space on their pages no index changes.
        TableSQL(
            "taskhistory",
            'ALTER TABLE "django_pglock_taskhistory" SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05)',
            'ALTER TABLE "django_pglock_taskhistory" RESET (fillfactor, autovacuum_vacuum_scale_factor)',
        ),
    ]
