"""Sentry's SDK with its Django integration, switched on in the tests before the first connection."""

from tests.foreign.base import *  # noqa: F403
