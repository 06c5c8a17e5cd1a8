from django.db import migrations, models

from django_pglock.migrations._operations import AddCheckOnline, ChangeRows

COMPLY = """UPDATE "django_pglock_task" SET backend = 'default' WHERE backend = ''"""


class Migration(migrations.Migration):
    """A constraint for rows that are written from now on."""

    dependencies = [("django_pglock", "9003_column_of_attempts")]
    operations = [
        ChangeRows("task", COMPLY),
        AddCheckOnline("task", models.CheckConstraint(condition=~models.Q(backend=""), name="online_check")),
    ]
