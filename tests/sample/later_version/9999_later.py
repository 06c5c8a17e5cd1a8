"""What a deploy brings that was written later."""

from django.db import migrations

from tests.sample.later_version import LAST


class Migration(migrations.Migration):
    """A migration that can be missing."""

    dependencies = [("django_pglock", LAST)]
    operations: list[object] = []
