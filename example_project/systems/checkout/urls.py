from django.urls import path

from example_project.systems.checkout import views

urlpatterns = [path("<uuid:cart_id>/", views.checkout), path("<uuid:cart_id>/async/", views.checkout_async)]
