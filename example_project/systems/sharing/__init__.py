"""Sharing: rows of a table, processed by any number of instances in equal shares.

**The problem.** Rows arrive in a table from time to time, and a program looks for new ones, processes them and marks
them. Run two instances of that program, and both find the same row.

**What PostgreSQL does about it.** ``FOR UPDATE SKIP LOCKED`` locks the rows that it returns to the end of the
transaction, and skips rows that others have locked. So each instance gets other rows, no instance waits, and the rows
of an instance that dies are free again when its session ends. Nothing has to be configured when instances come and go.

**Sharing rows** (``processing.py``) takes ``ClaimManager`` on the model, and ``filter(processed=False).claim(10)`` as a
block. Its rows are ours to the end of the block, which is the end of the transaction. ``listen`` wakes the instances
when a program that adds rows calls ``notify``, and lets them poll every second for rows without a notification.

**A row that cannot be processed** must not stop the others. Each row has a savepoint of its own, its failures are
counted in the row, and after three it is set aside. Rows are claimed by ``attempts`` first, so a row that has failed
comes after all that have not.

**A job for one instance at a time** (``report.py``) is a ``Lease``: ShedLock's ``lockAtMostFor`` is ``ttl``, its
``lockAtLeastFor`` is ``min_hold``. Only the server's clock is asked, so clocks of nodes that are wrong by an hour
neither let two nodes in nor keep all of them out. The ``ttl`` may be shorter than a run, because a node that lives
renews its lease: it is how long the others wait after a crash.

**Limits.** The transaction stays open while rows are processed, so a batch should be a matter of seconds. A row that
takes its whole process down is not counted, because the count is rolled back too: make such work a task, whose attempts
are counted before they begin.

**Where the article is wrong**, or says too little:

- It says that without SKIP LOCKED the instances block each other. Its query locks nothing: two instances read the same
  row, both process it, and the second UPDATE overwrites the first. The harm is work that is done twice.
- It says that instances get equal amounts. A claim takes what is free. Shares are equal where instances are equally
  fast; a slow one takes less, which is what one wants. A claim of all rows would leave nothing to the others.
- Its query has no order, and no index that leaves out what is processed. Without an order some rows wait forever
  while others arrive; without an index each claim reads past all the rows that were ever processed.
- It polls for new rows: most often in vain, and always late. A notification wakes who sleeps.
- It claims one row per transaction. A batch of ten pays for one claim and one commit.
- It calls a distributed lock the worse form of this. It is for something else: rows that can be processed independently
  are claimed; a job that is one piece, such as a report, needs the lock.

Run it: ``python3 manage.py systems sharing``. It starts seven processes.
"""
