"""Sharing: rows of a table, processed by any number of instances in equal shares.

The problem: rows arrive in a table from time to time, and a program looks for new ones, processes them and marks them.
Run two instances of that program, and both find the same row.

What PostgreSQL does about it: ``FOR UPDATE SKIP LOCKED`` locks the rows that it returns to the end of the transaction
and passes over rows that others have locked. So each instance gets other rows, nobody waits, and rows of an instance
that dies are free again the moment its session ends. Nothing has to be configured when instances come and go.

How the library is used:

- ``ClaimManager`` on the model, and ``Row.objects.filter(processed=False).claim(10)`` as a block: its rows are ours to
  the end of the block, which is the end of the transaction (``processing.py``).
- A row that cannot be processed must not stop the others. Each row has a savepoint of its own, its failures are
  counted in the row, and after three it is set aside. Rows are claimed by ``tries`` first, so a row that has failed
  comes after all that have not.
- A job that only one instance at a time may do is a ``Lease`` (``report.py``): ShedLock's ``lockAtMostFor`` is
  ``ttl``, its ``lockAtLeastFor`` is ``min_hold``. Only the server's clock is asked, so clocks of nodes that are wrong
  by an hour neither let two nodes in nor keep all of them out. The ``ttl`` need not be longer than the longest run,
  because a node that lives renews its lease: it is how long the others wait after a crash.

Where the article is mistaken:

- Without the lock, its query does not block anybody. A plain SELECT locks nothing: two instances read the same row,
  both process it, and the second UPDATE overwrites the first. The harm is work that is done twice.
- SKIP LOCKED alone does not share equally: a claim takes what is free. Shares are equal where instances are equally
  fast; a slow one takes less, which is what one wants. A claim of all rows would leave nothing to the others.
- Its query has no order, and no index that leaves out what is processed. The first makes some rows wait for ever
  while others arrive; without the second each claim reads past all the rows that were ever processed.
- It claims one row per transaction. A batch pays for one claim and one commit, not for ten.
- A distributed lock is not the poor form of this. Rows that can be processed independently are claimed; a job that is
  one piece, such as a report, needs the lock.

Its limits: the transaction stays open while rows are processed, so a batch should be a matter of seconds. A row that
takes its whole process down is not counted, because the count is rolled back too: make such work a task, whose
attempts are counted before they begin.

Run it: ``python3 manage.py systems sharing``.
"""
