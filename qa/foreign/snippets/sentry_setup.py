import sentry_sdk

from django_pglock.contrib.sentry import PGLockIntegration

sentry_sdk.init(
    integrations=[PGLockIntegration(monitor_schedules=True)],
    traces_sample_rate=0.1,
)
