"""The pages of the Django admin: overview, tasks, failures, workers, locks, leases, queues and schedules."""

from django.contrib import admin

from django_pglock.admin.failures import FailureGroup, FailureGroupAdmin
from django_pglock.admin.leases import LeaseAdmin
from django_pglock.admin.locks import AdvisoryLockAdmin
from django_pglock.admin.overview import Overview, OverviewAdmin
from django_pglock.admin.queues import QueueAdmin
from django_pglock.admin.schedules import ScheduleAdmin
from django_pglock.admin.tasks import TaskAdmin
from django_pglock.admin.workers import WorkerAdmin
from django_pglock.models import AdvisoryLock, Lease, Queue, Schedule, Task, Worker

admin.site.register(Overview, OverviewAdmin)
admin.site.register(Task, TaskAdmin)
admin.site.register(FailureGroup, FailureGroupAdmin)
admin.site.register(Worker, WorkerAdmin)
admin.site.register(AdvisoryLock, AdvisoryLockAdmin)
admin.site.register(Lease, LeaseAdmin)
admin.site.register(Queue, QueueAdmin)
admin.site.register(Schedule, ScheduleAdmin)
