"""The requests of holders: buy credits, use them, give them back."""

from django import forms
from django.db import transaction
from django.http import JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_POST

from django_pglock import lock_view
from example_project.systems.ledger.models import Entry
from example_project.systems.ledger.tasks import sell, send_back


class Order(forms.Form):
    """So many credits. The key is in the form before it is sent, so that a request that is repeated has the same."""

    amount = forms.IntegerField(min_value=1)
    key = forms.UUIDField()


@require_POST
def buy(request, holder):
    """Buy credits. They are added when the provider has charged; to add them needs no lock."""
    order = Order(request.POST)
    if not order.is_valid():
        return JsonResponse(order.errors, status=400)
    sell.enqueue(holder, order.cleaned_data["amount"], f"buy {order.cleaned_data['key']}")
    return JsonResponse({}, status=202)


@require_POST
@lock_view("ledger:{holder}", timeout=1)
def use(request, holder):
    """Use credits, if there are enough."""
    order = Order(request.POST)
    if not order.is_valid():
        return JsonResponse(order.errors, status=400)
    entry = Entry.objects.take(holder, order.cleaned_data["amount"], key=f"use {order.cleaned_data['key']}")
    return answer(holder, entry)


@require_POST
@lock_view("ledger:{holder}", timeout=1)
def refund(request, holder, entry_id):
    """Give back credits that were bought, if they are still there. The money follows the COMMIT."""
    bought = get_object_or_404(Entry, pk=entry_id, holder=holder, charge__isnull=False)
    with transaction.atomic():
        entry = Entry.objects.take(holder, bought.amount, key=f"refund of {bought.pk}")
        if entry is not None:
            send_back.enqueue(bought.charge, entry.key)
    return answer(holder, entry)


def answer(holder, entry):
    """Tell what is left, with 402 if it was not enough."""
    return JsonResponse({"balance": Entry.objects.balance_of(holder)}, status=201 if entry else 402)
