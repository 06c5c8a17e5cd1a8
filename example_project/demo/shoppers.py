"""Users who buy: real HTTP requests, many at once; some users press the button a hundred times."""

from __future__ import annotations

import http.client
import json
import secrets
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlencode
from uuid import uuid4

from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import User
from django.contrib.sessions.backends.db import SessionStore

from example_project.shop.models import CreditEntry, Product

#: What the names of the demo's users begin with.
SHOPPER = "demo-shopper-"


@dataclass(frozen=True)
class Shopper:
    """A user with a session and credits."""

    session: str
    product: int


def make_shoppers(count: int, *, gift: int, price: int) -> list[Shopper]:
    """Make users that are logged in, each with credits."""
    product = Product.objects.create(name="A book about locks", price=price)
    users = User.objects.bulk_create(User(username=f"{SHOPPER}{number}", password="!") for number in range(count))
    CreditEntry.objects.bulk_create(CreditEntry(user=user, amount=gift, reason="gift") for user in users)
    return [Shopper(log_in(user), product.pk) for user in users]


def log_in(user: User) -> str:
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.create()
    return str(session.session_key)


class Rush:
    """Sends checkouts over HTTP and counts the answers."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: Counter[int] = Counter()
        self.charged = 0
        self._lock = threading.Lock()

    def double_clicks(self, shopper: Shopper, clicks: int) -> None:
        """Press the button of one cart many times at once."""
        cart = str(uuid4())
        start = threading.Barrier(clicks)

        def press() -> None:
            start.wait(30)
            self.checkout(shopper, cart)

        with ThreadPoolExecutor(clicks) as pool:
            for press_ in [pool.submit(press) for _ in range(clicks)]:
                press_.result()

    def stream(self, shoppers: list[Shopper], *, carts: int, threads: int = 3) -> None:
        """Let all other shoppers buy: two clicks on each cart at once, repeated while the answer is 409."""
        # Shopper by shopper, so that two carts of one shopper are seldom paid at once. If they are, the second waits.
        baskets = [(shopper, str(uuid4())) for _ in range(carts) for shopper in shoppers]

        def buy(basket: tuple[Shopper, str]) -> None:
            clicks = [second.submit(self.checkout, *basket), second.submit(self.checkout, *basket)]
            answers = {click.result() for click in clicks}
            while answers == {409}:
                answers = {self.checkout(*basket)}

        with ThreadPoolExecutor(2 * threads) as second, ThreadPoolExecutor(threads) as pool:
            list(pool.map(buy, baskets))

    def checkout(self, shopper: Shopper, cart: str) -> int:
        """Send one checkout and count its answer."""
        token = secrets.token_hex(16)
        headers = {
            "Cookie": f"{settings.SESSION_COOKIE_NAME}={shopper.session}; {settings.CSRF_COOKIE_NAME}={token}",
            "X-CSRFToken": token,
            "Content-Type": "application/x-www-form-urlencoded",
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            body = urlencode({"cart": cart, "product": shopper.product})
            connection.request("POST", "/checkout/", body, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        with self._lock:
            self.answers[response.status] += 1
            self.charged += response.status == 200 and json.loads(content).get("charged", False)
        return response.status


def wait_for_shop(port: int, *, seconds: float = 120) -> None:
    """Wait until the shop answers. Raises ``TimeoutError``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/healthz/")
            connection.getresponse().read()
        except OSError:
            time.sleep(0.05)
        else:
            return
        finally:
            connection.close()
    raise TimeoutError(f"The shop did not answer on port {port} within {seconds:.0f} s.")
