"""Steps of the server's clock. A test cannot set it, so all dates that are stored in the tables are shifted instead."""

from __future__ import annotations

from django.db import connection

_COLUMNS = """
SELECT table_name, string_agg(format('%%1$I = %%1$I + make_interval(secs => %s)', column_name), ', ')
FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)
WHERE table_schema = current_schema() AND table_name LIKE 'django_pglock%%' AND table_type = 'BASE TABLE'
  AND data_type = 'timestamp with time zone'
GROUP BY table_name ORDER BY table_name
"""


def put_back(seconds: float) -> None:
    """Put the server's clock back; forward, if ``seconds`` is negative. In one transaction, like a real step."""
    with connection.cursor() as cursor:
        cursor.execute(_COLUMNS % float(seconds))
        changes = [f"UPDATE {table} SET {columns}" for table, columns in cursor.fetchall()]
        cursor.execute("; ".join(changes))
