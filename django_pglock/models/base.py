"""What the models share: default managers, a field, an index, and the databases that can have the tables.

From the default managers ``dumpdata`` takes the rows that it writes.

``dumpdata`` asks the default manager of each model: ``_default_manager.using(alias)``. It asks unmanaged models as
well, and databases of other vendors, where our tables do not exist. The only other way to leave rows out is a router,
which belongs to the project. So each model has a default manager, ``for_dumpdata``, which differs from ``objects`` in
``using()`` alone. Django's other uses of a default manager, as in the admin and in relations, do not call ``using()``
on the manager itself.
"""

from __future__ import annotations

import json
from typing import Any

from django.db import connections, models


def manager_for_dumpdata(manager: Any = models.Manager, *, is_dumped: bool = True) -> models.Manager[Any]:
    """Return the default manager of a model whose ``objects`` is of the class ``manager``.

    Its rows are in a dump, in each database that can have the table. ``is_dumped=False``: they are in no dump, because
    they would be wrong in another database.
    """

    class ForDumpdata(manager):  # type: ignore[misc]
        def using(self, alias: str | None) -> Any:
            rows = super().using(alias)
            return rows if is_dumped and connections[rows.db].vendor == "postgresql" else rows.none()

    # Type checkers look for the class where it says that it is.
    ForDumpdata.__module__, ForDumpdata.__qualname__ = manager.__module__, manager.__qualname__
    return ForDumpdata()


class CountsField(models.Field):  # type: ignore[type-arg]  # Django's class takes no arguments when it runs
    """The counts of a histogram by bucket, in a column of type ``bigint[]``.

    Django has a field for arrays only in ``django.contrib.postgres``, which a project need not have installed.
    """

    def db_type(self, connection: Any) -> str:
        """Return the type of the column."""
        return "bigint[]"

    def to_python(self, value: Any) -> Any:
        """Return a list, also for the text of a fixture."""
        return json.loads(value) if isinstance(value, str) else value

    def value_to_string(self, obj: Any) -> str:
        """Return the value as the text of a fixture."""
        return json.dumps(self.value_from_object(obj))


class OnPostgreSQL:
    """The base of each model's ``Meta``: in databases of other vendors there is no table, and no system check warns.

    Without a router Django migrates every app in every database of the project. ``migrate`` and the test runners skip
    a model whose ``required_db_vendor`` is another one. The system checks of indexes, constraints and defaults ask for
    the features instead.
    """

    required_db_vendor = "postgresql"
    required_db_features = (
        "supports_covering_indexes",
        "supports_expression_defaults",
        "supports_json_field",
        "supports_partial_indexes",
        "supports_table_check_constraints",
    )


class Row(models.Model):
    """The base of the models that have no ``__repr__`` of their own."""

    class Meta:
        abstract = True

    def __repr__(self) -> str:
        # Quoted: a name may contain a line break, and would forge a line of a log.
        return f"<{type(self).__name__} {str(self)!r}>"
