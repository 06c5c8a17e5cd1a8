"""Packages with tasks of Celery, which find the bridge where they import Celery. Celery itself is installed as well."""

from django_pglock.contrib.celery import install

# The first line: the apps below import Celery.
install()

from qa.foreign.base import *  # noqa: E402, F403
from qa.foreign.base import INSTALLED_APPS  # noqa: E402

INSTALLED_APPS = [*INSTALLED_APPS, "django_pglock.contrib.celery", "djcelery_email", "post_office", "cacheback"]
EMAIL_BACKEND = "djcelery_email.backends.CeleryEmailBackend"
CELERY_EMAIL_BACKEND = "qa.foreign.sample.mail.Backend"
CELERY_EMAIL_TASK_CONFIG = {"max_retries": 2, "default_retry_delay": 0}
POST_OFFICE = {"CELERY_ENABLED": True, "BACKENDS": {"default": "django.core.mail.backends.locmem.EmailBackend"}}
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
