from django.db import migrations, models

from django_pglock.migrations._operations import AddFieldOnline


class Migration(migrations.Migration):
    dependencies = [("django_pglock", "0008_running")]

    # A migration of its own: the operation before would keep its lock on the table of tasks while this one waits.
    operations = [
        AddFieldOnline("attempt", "log", models.TextField(null=True, verbose_name="log")),
    ]
