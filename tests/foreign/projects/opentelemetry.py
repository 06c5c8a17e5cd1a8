"""OpenTelemetry's instrumentation of Django and of psycopg, switched on in the tests before the first connection."""

from tests.foreign.base import *  # noqa: F403
