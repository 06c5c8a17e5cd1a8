"""OpenTelemetry's instrumentation of Django and of psycopg, switched on in the tests before the first connection."""

from qa.foreign.base import *  # noqa: F403
