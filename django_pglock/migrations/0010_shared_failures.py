from django.db import migrations, models

from django_pglock.migrations._operations import AddFieldOnline


class Migration(migrations.Migration):
    dependencies = [("django_pglock", "0009_attempt_log")]

    operations = [
        AddFieldOnline("queuecount", "failures", models.JSONField(null=True)),
    ]
