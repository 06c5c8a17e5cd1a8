"""The tests' settings, with the scope of locks that is for PgBouncer in transaction mode."""

from tests.settings import *  # noqa: F403
from tests.settings import DJANGO_PGLOCK

DJANGO_PGLOCK = {**DJANGO_PGLOCK, "SCOPE": "transaction"}
