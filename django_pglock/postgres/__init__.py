"""How this package talks to PostgreSQL: the only place that opens a session, or sends without Django's cursor.

- ``connections``: the state of a thread's Django connection: PostgreSQL or not, in a transaction or not, alive or not.
- ``sessions``: sessions in addition to Django's, opened in the same way as Django opens its own.
- ``message``: one message to the server, below Django's cursor if only Django's code is in between, else through it.
- ``exchange``: one exchange with the server by psycopg's own generators.
- ``notifications``: a loop that PostgreSQL wakes by LISTEN and NOTIFY.
- ``stopping``: ends the code of a cancelled attempt, in its own thread, at its next statement.
- ``forking``: makes forked child processes not use the sessions of their parent.
"""
