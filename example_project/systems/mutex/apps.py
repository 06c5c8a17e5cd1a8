"""The app of this system."""

from django.apps import AppConfig


class MutexConfig(AppConfig):
    """Has the tables of this system."""

    name = "example_project.systems.mutex"
    label = "mutex"
    default_auto_field = "django.db.models.BigAutoField"
