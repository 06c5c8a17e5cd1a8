from django.urls import path

from example_project.systems.ledger import views

urlpatterns = [
    path("<holder>/buy/", views.buy),
    path("<holder>/use/", views.use),
    path("<holder>/refund/<int:entry_id>/", views.refund),
]
