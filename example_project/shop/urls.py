"""The shop's addresses."""

from django.urls import path

from example_project.shop import views

app_name = "shop"
urlpatterns = [
    path("", views.index, name="index"),
    path("checkout/", views.checkout, name="checkout"),
    path("healthz/", views.healthz, name="healthz"),
]
