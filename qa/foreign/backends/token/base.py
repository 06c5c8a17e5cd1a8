"""The password comes with the parameters: ``get_connection_params()`` is asked for each connection."""

from __future__ import annotations

from typing import Any

from django.db.backends.postgresql import base

from qa.foreign.backends import TOKENS


class DatabaseWrapper(base.DatabaseWrapper):
    def get_connection_params(self) -> dict[str, Any]:
        return {**super().get_connection_params(), "password": TOKENS.token()}
