"""GeoDjango on PostGIS."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import DATABASES, INSTALLED_APPS

DATABASES["default"]["ENGINE"] = "django.contrib.gis.db.backends.postgis"
INSTALLED_APPS = [*INSTALLED_APPS, "django.contrib.gis", "qa.foreign.places"]
