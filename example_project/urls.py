"""Where the shop's pages and those of the systems are."""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("systems/checkout/", include("example_project.systems.checkout.urls")),
    path("systems/ledger/", include("example_project.systems.ledger.urls")),
    path("", include("example_project.shop.urls")),
]
