from django.db import migrations, models
from django.db.models.functions import Now

from django_pglock.migrations._operations import AddFieldOnline


class Migration(migrations.Migration):
    """A column with a default, in a migration of its own: the one before would keep its lock while this one waits."""

    dependencies = [("django_pglock", "9002_table_and_column")]
    operations = [AddFieldOnline("attempt", "noted_at", models.DateTimeField(db_default=Now()))]
