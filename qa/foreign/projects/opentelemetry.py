"""Our own instrumentor for OpenTelemetry, and those of Django and of psycopg."""

from qa.foreign.base import *  # noqa: F403
