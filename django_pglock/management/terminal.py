"""The terminal: a question before tasks are changed, and the name of the user that is stored with a change."""

from __future__ import annotations

import getpass

from django.core.management.base import CommandError
from django.utils.translation import gettext as _


def confirm() -> None:
    """Ask whether to go on. Raises ``CommandError`` for any other answer than yes."""
    try:
        answer = input(_("Continue? [y/N] "))
    except EOFError as error:
        raise CommandError(_("There is no terminal to ask for confirmation; give --yes.")) from error
    if answer.strip().lower() not in ("y", "yes"):
        raise CommandError(_("No task was changed."))


def name_of_user() -> str:
    """Return the name of the system user. A user without a name, as in some containers, is called locktasks."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "locktasks"
