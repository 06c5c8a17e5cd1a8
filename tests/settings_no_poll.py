"""Workers look for tasks only when they have been notified. On a slow machine, too, nobody is taken for dead."""

from tests.settings import *  # noqa: F403
from tests.settings import DJANGO_PGLOCK

DJANGO_PGLOCK = {**DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 2.0, "HEARTBEAT_LIMIT": 60.0, "POLL_INTERVAL": 600.0}
