"""The app that has the command ``systems``."""

from django.apps import AppConfig


class SystemsConfig(AppConfig):
    """Has no models: each system is an app of its own."""

    name = "example_project.systems"
    label = "systems"
