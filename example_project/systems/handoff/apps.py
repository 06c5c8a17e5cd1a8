"""The app of this system."""

from django.apps import AppConfig


class HandoffConfig(AppConfig):
    """Has the tables of this system."""

    name = "example_project.systems.handoff"
    label = "handoff"
    default_auto_field = "django.db.models.BigAutoField"
