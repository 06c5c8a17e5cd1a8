"""The tests' own app."""

from django.apps import AppConfig


class SampleConfig(AppConfig):
    """A project that uses the package."""

    name = "tests.sample"
    label = "sample"
    default_auto_field = "django.db.models.BigAutoField"
