"""The app of this system."""

from django.apps import AppConfig


class SharingConfig(AppConfig):
    """Has the tables of this system."""

    name = "example_project.systems.sharing"
    label = "sharing"
    default_auto_field = "django.db.models.BigAutoField"
