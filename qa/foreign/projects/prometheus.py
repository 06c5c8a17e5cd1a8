"""django-prometheus' database backend, and its middleware."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import DATABASES, INSTALLED_APPS

DATABASES["default"]["ENGINE"] = "django_prometheus.db.backends.postgresql"
INSTALLED_APPS = ["django_prometheus", *INSTALLED_APPS]
MIDDLEWARE = [
    "django_prometheus.middleware.PrometheusBeforeMiddleware",
    "django_prometheus.middleware.PrometheusAfterMiddleware",
]
