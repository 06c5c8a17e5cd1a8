"""The sample's views, and the toolbar's own."""

from django.urls import include, path

from qa.foreign.sample.urls import urlpatterns

urlpatterns = [*urlpatterns, path("__debug__/", include("debug_toolbar.urls"))]
