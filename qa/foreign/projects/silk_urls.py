"""The sample's views, and Silk's own."""

from django.urls import include, path

from qa.foreign.sample.urls import urlpatterns

urlpatterns = [*urlpatterns, path("silk/", include("silk.urls", namespace="silk"))]
