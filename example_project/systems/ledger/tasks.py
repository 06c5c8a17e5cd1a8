"""What has to do with the payment provider, outside of requests: the outbox. Its attempts last about a day."""

from django_pglock import Exponential, task
from example_project.systems import payments
from example_project.systems.ledger.models import Entry

PRICE = 2
PATIENT = {"queue_name": "ledger", "max_attempts": 40, "backoff": Exponential(cap=3600)}


@task(**PATIENT, atomic=True)
def sell(holder, amount, key):
    """Charge the holder and add the credits. A rollback leaves the charge; the next attempt finds it by its key."""
    charge = payments.charge(amount * PRICE, key=f"{holder}:{key}")
    Entry.objects.get_or_create(charge=charge, defaults={"holder": holder, "amount": amount, "key": key})


@task(**PATIENT)
def send_back(charge, key):
    """Give the money of a charge back."""
    payments.refund(charge, key=key)
