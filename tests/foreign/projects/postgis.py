"""GeoDjango on PostGIS."""

from tests.foreign.base import *  # noqa: F403
from tests.foreign.base import DATABASES, INSTALLED_APPS

DATABASES["default"]["ENGINE"] = "django.contrib.gis.db.backends.postgis"
INSTALLED_APPS = [*INSTALLED_APPS, "django.contrib.gis", "tests.foreign.places"]
