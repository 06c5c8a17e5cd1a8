"""The app of this system."""

from django.apps import AppConfig


class CheckoutConfig(AppConfig):
    """Has the tables of this system."""

    name = "example_project.systems.checkout"
    label = "checkout"
    default_auto_field = "django.db.models.BigAutoField"
