from django.db import migrations, models

from django_pglock.migrations._operations import AddFieldOnline


class Migration(migrations.Migration):
    dependencies = [("django_pglock", "0006_fingerprint_index")]

    operations = [
        migrations.AlterModelOptions(
            "task",
            {
                "ordering": ["-id"],
                "permissions": [
                    ("retry_task", "Can retry tasks"),
                    ("cancel_task", "Can cancel tasks"),
                    ("reset_task", "Can reset stuck tasks"),
                    ("export_task", "Can export tasks"),
                ],
                "required_db_vendor": "postgresql",
                "verbose_name": "task",
                "verbose_name_plural": "tasks",
            },
        ),
        # A column without a default: PostgreSQL does not write the rows.
        AddFieldOnline("attempt", "worker_name", models.CharField(max_length=128, null=True, verbose_name="worker")),
    ]
