"""Our own instrumentor for OpenTelemetry, and those of Django and of psycopg."""

from tests.foreign.base import *  # noqa: F403
