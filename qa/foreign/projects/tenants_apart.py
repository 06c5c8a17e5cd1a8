"""django-tenants with our tables in each tenant's schema, and in the public one."""

from qa.foreign.projects.tenants import *  # noqa: F403
from qa.foreign.projects.tenants import TENANT_APPS

TENANT_APPS = [*TENANT_APPS, "django_pglock"]
