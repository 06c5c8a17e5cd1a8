from django.db import migrations, models

from django_pglock.migrations._operations import AddFieldOnline, TableSQL


class Migration(migrations.Migration):
    """A new table, and a column of the table of tasks."""

    dependencies = [("django_pglock", "9001_index")]
    operations = [
        migrations.CreateModel("Online", [("id", models.BigAutoField(primary_key=True))]),
        TableSQL(
            "online",
            'ALTER TABLE "django_pglock_online" SET (fillfactor = 50)',
            'ALTER TABLE "django_pglock_online" RESET (fillfactor)',
        ),
        AddFieldOnline("task", "color", models.CharField(max_length=9, null=True)),
    ]
