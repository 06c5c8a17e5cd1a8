"""Functions with parameters of all kinds, and the form that enqueues them."""

from __future__ import annotations

from django.urls import reverse

PAGE = reverse("admin:django_pglock_task_enqueue")
SECRET = "4111-1111"


def greet(name: str, times: int = 1, *more, loud=False, **extras): ...


def pay(order_id: int, card, /, note: str = ""): ...


def enqueue(client, function, **arguments):
    data = {f"argument-{name}": value for name, value in arguments.items()}
    return client.post(f"{PAGE}?function={function.module_path}", data, follow=True)
