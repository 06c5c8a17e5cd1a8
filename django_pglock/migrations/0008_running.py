from django.db import migrations, models

from django_pglock.migrations._operations import AddFieldOnline


class Migration(migrations.Migration):
    dependencies = [("django_pglock", "0007_worker_names")]

    operations = [
        migrations.CreateModel(
            name="RunningStack",
            fields=[
                ("task", models.BigIntegerField(primary_key=True, serialize=False)),
                ("attempt", models.IntegerField()),
                ("worker", models.UUIDField()),
                ("asked_at", models.DateTimeField()),
                ("answered_at", models.DateTimeField(null=True)),
                ("stack", models.TextField()),
            ],
            options={
                "verbose_name": "stack of a running task",
                "verbose_name_plural": "stacks of running tasks",
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
        migrations.AlterModelOptions(
            "task",
            {
                "ordering": ["-id"],
                "permissions": [
                    ("retry_task", "Can retry tasks"),
                    ("cancel_task", "Can cancel tasks"),
                    ("reset_task", "Can reset stuck tasks"),
                    ("export_task", "Can export tasks"),
                    ("stack_task", "Can see the stacks of running tasks"),
                ],
                "required_db_features": (
                    "supports_expression_defaults",
                    "supports_json_field",
                    "supports_partial_indexes",
                    "supports_table_check_constraints",
                ),
                "required_db_vendor": "postgresql",
                "verbose_name": "task",
                "verbose_name_plural": "tasks",
            },
        ),
        # A column without a default: PostgreSQL does not write the rows.
        AddFieldOnline(
            "task",
            "log",
            models.TextField(null=True, editable=False, help_text="Log records of the last attempt.", verbose_name="log"),
        ),
    ]
