"""The statements that acquire and free advisory locks, and their order.

- ``session_scope``: locks that a session holds until it frees them.
- ``transaction_scope``: locks that a transaction holds until it ends.
- ``semaphore``: one lock of several.
- ``timeouts``: time limits in SQL, and the errors that report them.
- ``fragments``: parts of statements that all of them share.
- ``steps``: a way for threads and coroutines to execute the same statements.

Statements have no parameters. Keys and times are our own ints. The name is in a comment, without characters that could
end the comment. Because there are no parameters, one message can have several statements, so that each acquire is one
round trip. The answer is always the last result of the message. Its first column says whether the lock was granted.
With ``max_hold``, the next two columns are the previous idle limits.

PostgreSQL's rules: https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS and
https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS.
"""
