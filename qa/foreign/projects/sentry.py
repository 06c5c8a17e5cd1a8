"""Sentry's SDK with its Django integration, switched on in the tests before the first connection."""

from qa.foreign.base import *  # noqa: F403
