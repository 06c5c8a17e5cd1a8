"""The pages of the Django admin: overview, tasks, failures, workers, locks, leases, queues and schedules."""

from django_pglock.admin import failures, locks, overview, queues, schedules, tasks, workers  # noqa: F401
