"""The databases that our tables can be in."""

from __future__ import annotations


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
