"""django-silk, which keeps the statements of each request, with their plans, in the same database."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django.contrib.sessions", "django.contrib.staticfiles", "silk"]
MIDDLEWARE = ["silk.middleware.SilkyMiddleware"]
ROOT_URLCONF = "qa.foreign.projects.silk_urls"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": ["django.template.context_processors.request"]},
    }
]
