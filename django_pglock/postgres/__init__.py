"""How this package talks to PostgreSQL: the only place that opens a session, or sends without Django's cursor.

- ``connections``: Django's connection of a thread: is it PostgreSQL, in a transaction, alive.
- ``sessions``: sessions outside of Django's, opened the way that Django opens its own.
- ``async_sessions``: the same sessions, for coroutines.
- ``message``: one message to the server: below Django's cursor where nothing but Django is in between, else through it.
- ``libpq``: one exchange with the server by libpq's own calls.
- ``pending_statements``: which thread or coroutine of this process waits for an answer, and on which session.
- ``stacks``: the stacks of all threads, read safely.
- ``activity``: what the server says of sessions that this process waits for.
- ``connection_registry``: the Django connections of all threads.
- ``forking``: processes that are forked from this one do not use its sessions.
"""
