"""Workers look for tasks only when they have been notified."""

from tests.settings import *  # noqa: F403
from tests.settings import DJANGO_PGLOCK

DJANGO_PGLOCK = {**DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}
