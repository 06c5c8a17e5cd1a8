"""An array of numbers. Django has one only in ``django.contrib.postgres``, which a project need not have installed."""

from __future__ import annotations

import json
from typing import Any

from django.db import models


class CountsField(models.Field):  # type: ignore[type-arg]  # Django's class takes no arguments when it runs
    """The counts of a histogram by bucket, in a column of type ``bigint[]``."""

    def db_type(self, connection: Any) -> str:
        """Return the type of the column."""
        return "bigint[]"

    def to_python(self, value: Any) -> Any:
        """Return a list, also for the text of a fixture."""
        return json.loads(value) if isinstance(value, str) else value

    def value_to_string(self, obj: Any) -> str:
        """Return the value as the text of a fixture."""
        return json.dumps(self.value_from_object(obj))
