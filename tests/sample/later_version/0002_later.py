"""What a deploy brings that was written later."""

from django.db import migrations


class Migration(migrations.Migration):
    """A migration that can be missing."""

    dependencies = [("django_pglock", "0001_initial")]
    operations: list[object] = []
