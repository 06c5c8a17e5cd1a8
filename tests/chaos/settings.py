"""What a worker under test is configured with: everything at its default, unless the fault needs something else."""

import json
import os

from tests.settings import *  # noqa: F403

DJANGO_PGLOCK = json.loads(os.environ.get("CHAOS_PGLOCK", "{}"))
