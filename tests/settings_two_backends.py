"""Two backends on one database."""

from tests.settings import *  # noqa: F403
from tests.settings import TASKS

TASKS = {**TASKS, "reports": TASKS["default"]}
