"""django-tenants with our tables in the public schema only: the set-up for one worker of all tenants."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import DATABASES, INSTALLED_APPS

DATABASES["default"]["ENGINE"] = "django_tenants.postgresql_backend"
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
SHARED_APPS = ["django_tenants", "qa.foreign.customers", *INSTALLED_APPS]
TENANT_APPS = ["django.contrib.contenttypes", "qa.foreign.sample"]
INSTALLED_APPS = SHARED_APPS
TENANT_MODEL = "customers.Customer"
TENANT_DOMAIN_MODEL = "customers.Domain"
MIDDLEWARE = ["django_tenants.middleware.main.TenantMainMiddleware"]
MIGRATE = ("migrate_schemas", "--shared")
