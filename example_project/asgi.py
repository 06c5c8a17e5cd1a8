"""The example project as an ASGI application."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
# "manage.py locks" then shows which process holds a lock.
os.environ.setdefault("PGAPPNAME", f"asgi {os.getpid()}")

application = get_asgi_application()
