"""What runs beside the web servers: a reconciler, of which one works and others stand by, and a sale."""

import signal
from contextlib import suppress
from zlib import crc32

from django.db.models import F

from django_pglock import LockNotAvailable, leader, lock, lock_all
from example_project.systems.checkout.models import Cart, Payment


def settle_open():
    """Settle the payments that a crash has left open. Skip those with a checkout in progress or a failing provider."""
    for payment in Payment.objects.filter(charge=None).select_related("cart"):
        with suppress(LockNotAvailable, OSError), lock("checkout", payment.cart.customer_id, timeout=0):
            payment.settle()


def reconcile(ttl=15, pause=1):
    """Be the reconciler, or the next one when that is killed, ends, is frozen or is cut off."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the block ends, and the next leader is woken
    with leader("reconciler", ttl=ttl) as leadership:
        while not leadership.lost.wait(pause):
            settle_open()


@lock_all("shop", crc32(b"price change"))  # an older program, in another language, locks the CRC of this text
def begin_sale(percent):
    """Make all carts cheaper when the last checkout is over. One that comes meanwhile is answered with 503."""
    Cart.objects.filter(payment=None).update(total=F("total") * (100 - percent) / 100)
