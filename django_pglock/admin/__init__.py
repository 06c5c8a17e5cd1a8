"""The pages of the Django admin: overview, tasks, failures, workers, locks, leases, queues, schedules and
events."""

from django_pglock.admin import events, failures, locks, overview, queues, schedules, tasks, workers  # noqa: F401
