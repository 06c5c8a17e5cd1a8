"""Wagtail with our backend as the one of its tasks."""

import tempfile

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import INSTALLED_APPS

INSTALLED_APPS = [
    "wagtail.contrib.redirects",
    "wagtail.users",
    "wagtail.images",
    "wagtail.documents",
    "wagtail.search",
    "wagtail.admin",
    "wagtail",
    "modelcluster",
    "taggit",
    "django.contrib.admin",
    "django.contrib.sessions",
    "django.contrib.messages",
    *INSTALLED_APPS,
]
#: Wagtail's tables are made from its models: its two hundred migrations take ten seconds, and enqueue nothing.
MIGRATION_MODULES = {
    **dict.fromkeys(("wagtailredirects", "wagtailusers", "wagtailimages", "wagtaildocs", "wagtailsearch"), None),
    **dict.fromkeys(("wagtailadmin", "wagtailcore", "taggit", "admin", "sessions", "auth", "contenttypes"), None),
}
MIGRATE = ("migrate", "--run-syncdb")
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
WAGTAIL_SITE_NAME = "letters"
WAGTAILADMIN_BASE_URL = "http://letters.test"
WAGTAILSEARCH_BACKENDS = {"default": {"BACKEND": "wagtail.search.backends.database"}}
WAGTAILIMAGES_FEATURE_DETECTION_ENABLED = False
# Removed when the process ends.
_media = tempfile.TemporaryDirectory(prefix="django-pglock-foreign-")
MEDIA_ROOT = _media.name
