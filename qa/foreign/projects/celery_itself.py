"""Celery itself, with a worker in this process, beside the bridge."""

from qa.foreign.base import *  # noqa: F403
