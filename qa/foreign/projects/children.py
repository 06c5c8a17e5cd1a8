"""Sentry's SDK and OpenTelemetry's, started in the settings as projects do, each with a thread that sends."""

import os

import sentry_sdk
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from django_pglock.contrib.opentelemetry import PGLockInstrumentor
from django_pglock.contrib.sentry import PGLockIntegration
from qa.foreign.base import *  # noqa: F403

if dsn := os.environ.get("SENTRY_DSN"):
    sentry_sdk.init(dsn, integrations=[PGLockIntegration()])
    trace.set_tracer_provider(TracerProvider())
    trace.get_tracer_provider().add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
    PGLockInstrumentor().instrument()
    if os.environ.get("SENDS_WHILE_LOADED"):
        sentry_sdk.capture_message("The project is being loaded.")
        sentry_sdk.flush()
