"""The mutex: rows of a table as locks, with owners, time limits, states, retries and queues.

The problem
    Several programs share a database and nothing else. Only one of them may work on a task at a time. A
    program may die in the middle, and its task must not be lost. There is no lock server, and there must be none.

What PostgreSQL does about it
    A row can be the lock. An UPDATE that names the state from which it moves a row checks and changes the state in one
    step: of all clients that send it, one moves the row. ``FOR UPDATE SKIP LOCKED`` gives each of many clients other
    rows, and no client waits. Unlike an advisory lock, such a lock stays after the end of sessions, behind poolers, and
    after restarts and failovers, and each client can read it.

How it is built
    ``TaskState`` in ``models.py`` is a project's own table, of which the library knows nothing. Its queryset derives
    from ``ClaimQuerySet`` and needs one verb of it, ``claim_update()``. The mutex, the lock with a timeout and the
    state machine are one thing here: the program that moves a row to IN_PROGRESS holds it.

    - ``acquire()`` takes one row for an owner, ``release()`` gives it back.
    - A timeout says until when a row stays in its status. ``move_stale()`` then moves it on: from IN_PROGRESS to
      EXPIRED, so that another client can take it, and from DONE to NEW, so that ``release(Status.DONE, timedelta(1))``
      makes a daily task of it.
    - ``capture()`` takes up to so many rows from any of three statuses, by one guarded statement.
    - ``retries_left`` falls by one with each taking. A row without any left is not taken again.
    - A name is unique in its queue. A queue is ``filter(queue=...)``.

    The token counts how often a row was taken. A holder that was frozen for longer than its timeout still has the old
    token, so its ``release()`` changes nothing and says so.

Where the article is wrong
    - Its mutex has no owner, so a client that comes back late releases what is another client's by now.
    - Its timeout is compared with the client's time. A clock that is an hour fast takes every lock of less than an hour
      away from its holder. Here each time is the server's: ``Now()`` in the statement.
    - Its capture selects with LIMIT in a subquery that locks nothing. Two clients at once read the same rows. The
      second one waits for the first, then PostgreSQL compares the row with ``id IN (...)`` alone, and gives it to
      both. ``FOR UPDATE SKIP LOCKED`` in the subquery compares the status of the row as it is now, and
      ``MATERIALIZED`` runs the subquery once. This is what ``claim_update()`` sends.
    - It sets a status without asking for the one before, so a late answer overwrites a newer one.
    - It needs a process that moves stale rows on. Here each client does so before it captures; this costs two searches
      in an index.

Run it with ``python3 manage.py systems mutex``.
"""
