"""Sentry's SDK with our own integration, and with Sentry's of Django."""

from qa.foreign.base import *  # noqa: F403
