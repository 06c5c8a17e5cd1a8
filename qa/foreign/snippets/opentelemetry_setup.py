from django_pglock.contrib.opentelemetry import PGLockInstrumentor

PGLockInstrumentor().instrument()
