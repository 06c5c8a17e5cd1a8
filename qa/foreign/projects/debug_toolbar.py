"""django-debug-toolbar with its SQL panel."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django.contrib.staticfiles", "debug_toolbar"]
MIDDLEWARE = ["debug_toolbar.middleware.DebugToolbarMiddleware"]
ROOT_URLCONF = "qa.foreign.projects.debug_toolbar_urls"
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
DEBUG_TOOLBAR_CONFIG = {"SHOW_TOOLBAR_CALLBACK": lambda request: True}
DEBUG_TOOLBAR_PANELS = ["debug_toolbar.panels.sql.SQLPanel", "debug_toolbar.panels.tasks.TasksPanel"]
