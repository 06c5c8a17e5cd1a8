"""The shop's addresses."""

urlpatterns: list = []
