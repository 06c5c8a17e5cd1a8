"""``locktasks index``: create or drop the index on arguments and metadata."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _

from django_pglock.store.argument_index import create_argument_index, drop_argument_index


def add_options(parser: CommandParser) -> None:
    """Add the options: which index, and whether to drop it."""
    parser.add_argument(
        "--arguments", action="store_true", required=True, help=_("The index on arguments and metadata.")
    )
    parser.add_argument("--drop", action="store_true", help=_("Drop the index."))


def change_index(using: str, options: dict[str, Any]) -> str:
    """Create or drop the index. Return a message about it."""
    if options["drop"]:
        return _("The index was dropped.") if drop_argument_index(using) else _("There is no index.")
    if create_argument_index(using):
        return _("The index was created: the filters by argument and metadata find tasks of any age.")
    return _("The index is there already.")
