"""A project that says that a fork is not safe."""

import multiprocessing

from tests.settings import *  # noqa: F403

multiprocessing.set_start_method("spawn", force=True)
