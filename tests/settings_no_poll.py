"""Workers poll only after a notification. No worker counts as dead, also on a slow machine."""

from tests.settings import *  # noqa: F403
from tests.settings import DJANGO_PGLOCK

DJANGO_PGLOCK = {**DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 2.0, "POLL_INTERVAL": 600.0}
