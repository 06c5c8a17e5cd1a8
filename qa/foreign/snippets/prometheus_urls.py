from django.urls import path

from django_pglock.contrib.prometheus import metrics

urlpatterns = [
    path("metrics", metrics),
]
