"""Migrations as a later version may bring them: each operation for a table in use, on top of the package's own ones."""

from django_pglock import migrations
from tests.sample.later_version import LAST

__all__ = ["LAST"]

__path__ = [*__path__, *migrations.__path__]
