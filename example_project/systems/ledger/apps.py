"""The app of this system."""

from django.apps import AppConfig


class LedgerConfig(AppConfig):
    """Has the tables of this system."""

    name = "example_project.systems.ledger"
    label = "ledger"
    default_auto_field = "django.db.models.BigAutoField"
