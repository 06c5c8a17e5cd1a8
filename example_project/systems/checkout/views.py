"""The checkout, as a sync view and as an async one."""

from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_required
from django.http import JsonResponse
from django.shortcuts import aget_object_or_404, get_object_or_404
from django.views.decorators.http import require_POST

from django_pglock import lock_view
from example_project.systems import payments
from example_project.systems.checkout.models import Cart, Payment


@login_required
@require_POST
@lock_view("shop", shared=True, status=503, retry_after=10)
@lock_view("checkout:{request.user.pk}")
def checkout(request, cart_id):
    """Pay a cart. The second of two clicks gets 409, and a later one the payment that there is."""
    cart = get_object_or_404(Cart, pk=cart_id, customer=request.user)
    payment, _ = Payment.objects.get_or_create(cart=cart, defaults={"amount": cart.total})
    payment.settle()
    return JsonResponse({"charge": payment.charge, "invoice": payment.invoice})


@login_required
@require_POST
@lock_view("shop", shared=True, status=503, retry_after=10)
@lock_view("checkout:{request.user.pk}")
async def checkout_async(request, cart_id):
    """Pay a cart. No thread waits for the provider."""
    cart = await aget_object_or_404(Cart, pk=cart_id, customer=await request.auser())
    payment, _ = await Payment.objects.aget_or_create(cart=cart, defaults={"amount": cart.total})
    if payment.charge is None:
        await sync_to_async(payment.finish)(await payments.acharge(payment.amount, key=cart.pk))
    return JsonResponse({"charge": payment.charge, "invoice": payment.invoice})
