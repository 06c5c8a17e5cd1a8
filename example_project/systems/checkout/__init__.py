"""The checkout: an endpoint that charges once, however often and wherever its button is pressed.

**The problem.** A customer presses the button twice, the two requests reach two processes, and both charge. Or a
process charges, and dies before it has written that it did. And beside the endpoint there is work that one process at
a time must do, with a second one ready for the moment at which the first is gone.

**The endpoint** (``views.py``) has three defences, because each alone has a gap:

- The *lock* ``checkout:{request.user.pk}`` answers the second of two clicks with 409 while the first is in progress. It
  is a session lock, so that no transaction is open while the provider is asked, and it does not wait, because a
  request that waits occupies a web worker. It says nothing about a click that comes when the first is over.
- The *constraint* ``Payment.cart`` allows one payment for each cart, now and later. The row is committed before the
  money moves, so a crash leaves an open payment, and not a charge without a record.
- The *idempotency key*, the id of the cart, makes the provider charge once. If the customer or the
  reconciler asks again, it gets the existing charge.

``lock("invoices")`` in ``models.py`` is a transaction lock: inside ``atomic()`` it lasts to the COMMIT, so that the
next one reads the number that was given last. A sequence would leave gaps where a transaction is rolled back.

``lock_view("shop", shared=True)`` allows all checkouts at once, and none while ``begin_sale`` holds the same lock
exclusively. The sale waits for the checkouts that are in progress. PostgreSQL serves the queue in order, so new
checkouts do not delay the sale.

**The reconciler** (``workers.py``) settles what crashes have left open. Any number of processes run it, and one
works. It is built twice. ``leader`` is a row with an end: another process takes over when the first is killed, ends,
is cut off from the database or is frozen. ``try_lock`` around a loop needs no table, and takes over in the same cases
but the last: a frozen process keeps its session, and with it the lock, until ``manage.py locks --terminate`` ends the
session.

**Where the article is wrong**, or says too little:

- It takes the lock for all that is needed. A lock cannot stop a second click that comes after the first has finished,
  nor undo a charge whose process has crashed.
- It says that the second worker waits until the first crashes or exits. One that hangs does neither; one whose
  session was ended works on without the lock. Here a leader has a lease: the next one takes over when the first
  hangs, and ``leadership.lost`` tells the first.
- It waits for the lock without limit. The waiting statement keeps a snapshot, so vacuum removes no dead row of the
  database until it ends. Who waits for a lease holds no snapshot.
- Its keys are CRCs. Among some ten thousand names two have the same one, and then strangers wait for each other. A
  name here is hashed to 64 bits. ``lock(crc32(b"price change"))`` takes the key of another program that uses a CRC.
- Its query of ``pg_locks`` shows locks of all databases of the server, and a number instead of a name. ``manage.py
  locks`` shows this database, names, and who waits for whom.

Run it: ``python3 manage.py systems checkout``. It starts two processes of gunicorn, two of uvicorn, a payment
provider and five reconcilers.
"""
