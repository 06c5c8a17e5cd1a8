"""The shop's addresses."""

from django.urls import path

urlpatterns: list = []
