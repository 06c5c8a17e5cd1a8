"""The password is put in at the last moment: ``get_new_connection()`` is where Django connects."""

from __future__ import annotations

from typing import Any

from django.db.backends.postgresql import base

from qa.foreign.backends import TOKENS


class DatabaseWrapper(base.DatabaseWrapper):
    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        return super().get_new_connection({**conn_params, "password": TOKENS.token()})
