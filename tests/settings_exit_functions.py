"""A project that does something at the end of the process that has loaded it."""

import atexit
import os

from tests.settings import *  # noqa: F403

atexit.register(lambda: print(f"The project ends in {os.getpid()}.", flush=True))
