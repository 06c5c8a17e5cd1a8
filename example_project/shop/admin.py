"""The shop in the admin."""

from django.contrib import admin

from example_project.shop.models import CreditEntry, Order, Product, Receipt

admin.site.register(Product)
admin.site.register([Order, CreditEntry, Receipt])
