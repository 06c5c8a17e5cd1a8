"""The hand-off: requests of a front end, handed to any number of back ends, in order and in groups.

**The problem.** Users click to have a sheet created, and later to have lines added to it. A front end takes the clicks
and answers at once; back ends do the work, as many as there are machines. A sheet is created once, however often
somebody clicks. Updates wait for a create that was committed before them, and end as errors without one. The updates of
a sheet run in their order and never two at a time; all that wait run together. If a back end dies in the middle, its
requests are as new as before. If none is running, requests wait. All requests stay in the database as the history.

**What PostgreSQL does about it.** A request is a row, so it is there after the COMMIT and nothing can lose it. FOR
UPDATE SKIP LOCKED gives each back end another row; a session that ends gives its rows back by itself. A partial unique
index allows one create for each sheet. NOTIFY wakes the back ends that listen.

**Built twice**, and both make the same sheets:

- ``tasks.py``: ``lock=`` is the place in the queue of a sheet, whatever the function; ``group=`` runs the updates that
  are next there in one call; ``unique=`` skips the second click; ``atomic=True`` commits the lines together with the
  end of the task. Workers, retries, history, admin and the rescue of what a dead worker had come with it.
- ``back_end.py``, with the table in ``models.py`` and no other: ``ClaimManager.claim_each`` holds one row after the
  other to the end of a transaction each, in which everything is done (commitment control). Only the oldest new request
  of a sheet can be claimed, so nobody else can have another one of that sheet meanwhile. ``listen`` gives the loop a
  turn at the start, after each ``notify``, and every second.

**The line in the sand.** While any transaction of the database is open for long, the rows that were handled since
cannot be removed from the index, and each search from its start walks past all of them. ``claim_each`` and the worker
search behind the row that they found last, and return to the start from time to time.

**Where the article is wrong.**

- It marks a request as in progress in the transaction that handles it. Nobody else ever sees that mark; ``pg_locks``
  does.
- A back end takes an update whose sheet is busy, is refused the other rows (NOWAIT), and rolls back. As long as the
  sheet is busy, all idle back ends do so in a loop, and each round leaves a dead row. Two that have one update each of
  one sheet refuse each other, and none of them needs to get through.
- No notification is sent for the rows of a killed back end: they wait for the next click. So poll from time to time.
- The line is drawn again at the start only when nothing is found behind it. Under steady load that is never, and a
  request that was given back waits all the time. A pass needs an end.
- Ids are given out at INSERT and seen after COMMIT. An older update may appear while a younger one of the sheet runs,
  so the row of the sheet is locked as well.
- Its unique index also counts a create that has ended as an error: that sheet can never be created. Here a create
  cannot fail; where it can, add ``& ~Q(status="error")`` to the condition.
- A back end that is frozen, and not dead, keeps its rows as long as its session lives. In the table's way only
  ``idle_in_transaction_session_timeout`` ends that; the tasks' heartbeat does it by itself.
- ``CONSTRAINT CHECK (…)`` is a syntax error, and one column has two names.

``python3 manage.py systems handoff`` runs both with 10,000 requests and kills back ends in between. Then it runs the
search table.

The second half, ``search.py``: a search table about orders, gathered from 17 tables that many programs write to. A
trigger on each table makes tasks of its changes, in the transaction of the change, also of plain SQL and COPY. The
programs need not know of it. A task reads the 17 tables again for the orders that have changed, and writes their
entries.
"""
