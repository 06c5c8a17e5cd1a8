"""The shop's pages. Pressing the button twice charges once."""

from __future__ import annotations

import time
from uuid import UUID, uuid4

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_http_methods

from django_pglock import lock, lock_view
from django_pglock.models import Task
from example_project.shop.health import health
from example_project.shop.models import CreditEntry, Order, Product
from example_project.shop.tasks import send_receipt


@login_required
@require_GET
def index(request: HttpRequest) -> HttpResponse:
    """Show what there is to buy, each with a cart of its own."""
    products = [(product, uuid4()) for product in Product.objects.order_by("name")]
    balance = CreditEntry.objects.balance_of(request.user.pk)
    return render(request, "shop/index.html", {"products": products, "balance": balance})


@login_required
@require_http_methods(["POST"])
@lock_view("checkout:{request.user.pk}")
def checkout(request: HttpRequest) -> HttpResponse:
    """Pay a cart. A second click gets 409 during the first one, and afterwards the existing order."""
    try:
        cart, product = UUID(request.POST["cart"]), Product.objects.get(pk=request.POST["product"])
    except (KeyError, ValueError, Product.DoesNotExist):
        return JsonResponse({"error": "A cart and a product are needed."}, status=400)
    order = Order.objects.filter(cart=cart, user=request.user).first()
    if order is not None:
        return answer(request, order, charged=False)
    time.sleep(settings.SHOP_PAYMENT_SECONDS)  # the time that the bank needs
    return pay(request, cart, product)


def pay(request: HttpRequest, cart: UUID, product: Product) -> HttpResponse:
    """Charge the ledger and write the order, together with the task for its receipt."""
    user_id = request.user.pk
    with transaction.atomic(), lock("ledger", user_id):
        if CreditEntry.objects.balance_of(user_id) < product.price:
            return JsonResponse({"error": "There are not enough credits."}, status=402)
        charge = CreditEntry.objects.create(user_id=user_id, amount=-product.price, reason=product.name)
        order = Order.objects.create(user_id=user_id, product=product, cart=cart, charge=charge)
        send_receipt.enqueue(order_id=order.pk)
    return answer(request, order, charged=True)


def answer(request: HttpRequest, order: Order, *, charged: bool) -> HttpResponse:
    """Answer a program by JSON, and a person by a page with links to what there is behind it."""
    if request.get_preferred_type(["application/json", "text/html"]) != "text/html":
        return JsonResponse({"order": order.pk, "charged": charged})
    receipt = Task.objects.filter(task_path=send_receipt.module_path, kwargs={"order_id": order.pk}).last()
    return render(request, "shop/order.html", {"order": order, "charged": charged, "receipt": receipt})


@require_GET
def healthz(request: HttpRequest) -> HttpResponse:
    """Answer 200 if tasks are processed, or 503 with the reason, for load balancers and people."""
    report = health()
    return JsonResponse(report, status=200 if report["healthy"] else 503)
