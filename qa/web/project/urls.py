"""The address of each kind of view."""

from django.urls import path

from qa.web.project import views

urlpatterns = [
    path("ready/", views.ready),
    path("collect/<name>/", views.collect),
    path("plain/<name>/", views.plain),
    path("plain_async/<name>/", views.plain_async),
    path("waits/<name>/", views.waits),
    path("waits_async/<name>/", views.waits_async),
    path("stream/<name>/", views.stream),
    path("stream_async/<name>/", views.stream_async),
    path("template/<name>/", views.template),
    path("template_class/<name>/", views.Template.as_view()),
    path("file/<name>/", views.file),
]
