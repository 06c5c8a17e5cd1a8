from django.db import migrations, models

from django_pglock.migrations._operations import PartitionTable


class Migration(migrations.Migration):
    """A new table that is partitioned."""

    dependencies = [("django_pglock", "9003_column_of_attempts")]
    operations = [
        migrations.CreateModel(
            "OnlineDay", [("id", models.BigIntegerField(primary_key=True)), ("day", models.DateField())]
        ),
        PartitionTable("onlineday", "day"),
    ]
