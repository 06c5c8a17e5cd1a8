import django.db.models.manager
from django.db import migrations, models

from django_pglock.migrations._operations import AddFieldOnline


class Migration(migrations.Migration):
    dependencies = [("django_pglock", "0004_task_history")]

    operations = [
        migrations.CreateModel(
            name="FailureGroup",
            fields=[
                ("fingerprint", models.BigIntegerField(primary_key=True, serialize=False, verbose_name="fingerprint")),
                ("muted_at", models.DateTimeField(null=True, verbose_name="muted at")),
                ("muted_by", models.CharField(blank=True, default="", max_length=255, verbose_name="muted by")),
            ],
            options={
                "verbose_name": "failure",
                "verbose_name_plural": "failures",
                "permissions": [("mute_failuregroup", "Can mute failures")],
                "default_permissions": (),
                "required_db_features": (
                    "supports_expression_defaults",
                    "supports_json_field",
                    "supports_partial_indexes",
                    "supports_table_check_constraints",
                ),
                "required_db_vendor": "postgresql",
            },
            managers=[("for_dumpdata", django.db.models.manager.Manager())],
        ),
        AddFieldOnline(
            "task", "fingerprint", models.BigIntegerField(verbose_name="fingerprint", null=True, editable=False)
        ),
    ]
