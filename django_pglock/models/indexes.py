"""A BRIN index. Django has one only in ``django.contrib.postgres``, which a project need not have installed."""

from __future__ import annotations

from typing import Any

from django.db import models


class BrinIndex(models.Index):
    """A block range index: a few hundred kilobytes for ten million rows in order of time."""

    suffix = "brin"

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **kwargs: Any) -> Any:
        """Return the statement that makes the index, as Django asks for it."""
        return super().create_sql(model, schema_editor, using=" USING brin", **kwargs)
