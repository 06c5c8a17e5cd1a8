"""The default managers of our models, from which ``dumpdata`` takes the rows that it writes.

``dumpdata`` asks the default manager of each model: ``_default_manager.using(alias)``. It asks unmanaged models as
well, and databases of other vendors, where our tables do not exist. The only other way to leave rows out is a router,
which belongs to the project. So each model has a default manager, ``for_dumpdata``, which differs from ``objects`` in
``using()`` alone. Django's other uses of a default manager, as in the admin and in relations, do not call ``using()``
on the manager itself.
"""

from __future__ import annotations

from typing import Any

from django.db import connections, models


class Dumped:
    """Includes the rows of a default manager in a dump, in each database that can have the table."""

    def using(self, alias: str | None) -> Any:
        """Return all rows, or none in a database of another vendor."""
        rows = super().using(alias)  # type: ignore[misc]
        return rows if connections[rows.db].vendor == "postgresql" else rows.none()


class NotDumped:
    """Excludes the rows of a default manager from a dump, because they would be wrong in another database."""

    def using(self, alias: str | None) -> Any:
        """Return no row."""
        return super().using(alias).none()  # type: ignore[misc]


class DumpedManager(Dumped, models.Manager[Any]):
    """The default manager of a model without verbs of its own."""
