"""How this package talks to PostgreSQL: the only place that opens a session or sends below Django's cursor.

- ``connections``: Django's connection of a thread: is it PostgreSQL, in a transaction, alive.
- ``sessions``: sessions outside of Django's, opened the way that Django opens its own.
- ``async_sessions``: the same sessions, for coroutines.
- ``message``: one message to the server: below Django's cursor if nothing foreign stands in between, else through it.
- ``libpq``: one exchange with the server by libpq's own calls.
- ``forking``: processes that are forked from this one leave its sessions alone.
"""
