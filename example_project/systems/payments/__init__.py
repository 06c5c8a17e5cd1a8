"""The client of a payment provider, as one installs it from the provider: ``charge`` and ``refund`` over HTTP.

Whatever is asked twice with the same key is done once, and both answers are the same. The provider is
``example_project/systems/payments/server.py``, at the address of the setting ``PAYMENTS_URL``.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any
from urllib.error import HTTPError

from asgiref.sync import sync_to_async
from django.conf import settings

#: Seconds. A provider that does not answer for so long counts as unreachable: ``TimeoutError`` or ``URLError``.
TIMEOUT = 60


def charge(amount: int, *, key: object) -> str:
    """Take an amount of money from the customer; return the id of the charge. Raises ``OSError``."""
    return str(_post("charges", key, {"amount": amount})["id"])


def refund(charge_id: str, *, key: object) -> str:
    """Give the money of a charge back; return the id of the refund. Raises ``OSError``."""
    return str(_post("refunds", key, {"charge": charge_id})["id"])


#: The same in a coroutine.
acharge = sync_to_async(charge, thread_sensitive=False)


def _post(path: str, key: object, content: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Idempotency-Key": str(key)}
    request = urllib.request.Request(f"{settings.PAYMENTS_URL}/{path}", json.dumps(content).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except HTTPError as error:
        error.close()  # until then, the exception keeps the connection open
        raise
