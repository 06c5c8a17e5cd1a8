"""The shop as a WSGI application."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
# "manage.py locks" then shows which process holds a lock.
os.environ.setdefault("PGAPPNAME", f"wsgi {os.getpid()}")

application = get_wsgi_application()
