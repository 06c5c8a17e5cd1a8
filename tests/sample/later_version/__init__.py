"""The migrations of a later version of the package: its own, and a migration that changes nothing."""

from pkgutil import iter_modules

from django_pglock import migrations

#: The last migration that the package has now.
LAST = sorted(each.name for each in iter_modules(migrations.__path__) if each.name[0] != "_")[-1]

__path__ = [*__path__, *migrations.__path__]
