"""What is sent to PostgreSQL to acquire and to free advisory locks, and in which order.

- ``session_scope``: locks that a session holds until it frees them.
- ``transaction_scope``: locks that a transaction holds until it ends.
- ``semaphore``: one lock of several.
- ``timeouts``: how a limit in time becomes SQL, and which error reports that it was reached.
- ``fragments``: parts of statements that all of them share.
- ``steps``: how threads and coroutines run the same statements.

Statements have no parameters. Keys and times are ints of ours, and the name stands in a comment from which everything
is removed that could end the comment. Without parameters several statements travel in one message, so that each acquire
is one round trip. The answer is always the last result of the message. Its first column says whether the lock was
granted. With ``max_hold``, the next two columns are the idle limits as they were before.

PostgreSQL's rules: https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS and
https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS.
"""
