"""The ledger: a balance that racing purchases cannot overdraw, and a payment that is sent once.

**The problem.** Credits are bought, used and given back, and each of these adds an entry to a table; the balance of a
holder is the sum of the holder's entries. Two requests read the same balance, both find it large enough, and together
they use more than there is. No row can be locked, since none is changed, and a lock on the table stops all holders.
Besides, money moves at a payment provider, where no rollback undoes it.

**Using credits** (``views.py``): ``lock_view("ledger:{holder}", timeout=1)`` takes the lock ``lock("ledger",
holder)`` around the request, with the holder from its address. Of several requests of one holder each sees what the
one before has added; other holders do not wait. Who has waited for a second gets 409 and ``Retry-After``: browsers as
the page ``templates/409.html``, clients that ask for JSON as a problem detail. The lock is a session lock, in the
session in which the view reads and writes: if the session is lost, the lock and the next statement fail together.

**A request that is repeated** has the same key, which was in the form before it was sent. A constraint allows one
entry for each key, and the second request is answered with the first one's entry, whatever amount it names. The keys
of purchases, uses and refunds begin with different words.

**Buying credits** (``tasks.py``) charges at the provider, and then adds the credits. The task is the outbox: it is
there when the request was answered, and it is tried again for about a day; then it is FAILED, and a person retries it
in the admin when the provider is well. With ``atomic=True`` the credits and the
end of the task are one transaction. If that is rolled back behind the charge, by a crash or a lost session, the next
attempt asks with the same key and gets the same charge. Django sends BEGIN with the first statement, so no
transaction is open while the provider is asked. To add credits needs no lock: they cannot overdraw anything.

**A refund** takes the credits back under the lock, if they are still there, and enqueues ``send_back`` in the same
transaction: the money follows the COMMIT, and a rollback sends none. Its key is made from the entry, so there is one.

**Where the article is wrong**, or says too little:

- It blames a retry after a timeout, and then takes only a lock. The retry comes after the first request, finds the
  lock free, and uses the credits a second time if there are enough. That takes a key, not a lock.
- It says that ``pg_advisory_lock`` reports an error if the lock is busy. It waits, without limit.
- It names ``pg_advisory_xact_unlock``, which does not exist: a transaction lock ends with its transaction only.
- Its keys are hashes of 32 bits. Among 77,000 holders two have the same one with a probability of a half, and then
  wait for each other. Names are hashed to 64 bits here.
- It takes the lock in a middleware, and so in another session than the queries. If that session is lost, the handler
  continues without the lock and does not know.

Run it: ``python3 manage.py systems ledger``. It starts two processes of gunicorn, two workers and a payment provider.
"""
