"""The shop."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class ShopConfig(AppConfig):
    """Sells one product to people who press the button twice."""

    name = "example_project.shop"
    label = "shop"
    verbose_name = _("Shop")
    default_auto_field = "django.db.models.BigAutoField"
