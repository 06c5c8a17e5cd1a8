"""The statements about leases: acquire, renew, release. All times are the database's."""

from __future__ import annotations

TABLE = '"django_pglock_lease"'
#: The channel for released leases. The payload is the lease's key.
CHANNEL = "django_pglock_lease"
#: Set explicitly, because the role may have another default. At a higher level, one of two concurrent sessions would
#: fail.
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;"
#: A lease is free after its expiry. A release sets the expiry to now. A lease without a ttl has no expiry. If another
#: holder has the lease, the second SELECT returns the seconds until its expiry.
ACQUIRE = f"""
WITH taken AS (
    INSERT INTO {TABLE} AS l (key, name, owner, holder, token, ttl, acquired_at, renewed_at, expires_at)
    SELECT %(key)s, %(name)s, %(owner)s, %(holder)s, 1, %(ttl)s::interval, t, t,
        t + %(ttl)s::interval
    FROM (SELECT clock_timestamp() AS t) AS n
    ON CONFLICT (key) DO UPDATE SET name = EXCLUDED.name, owner = EXCLUDED.owner, holder = EXCLUDED.holder,
        token = l.token + 1, ttl = EXCLUDED.ttl, acquired_at = EXCLUDED.acquired_at, renewed_at = EXCLUDED.renewed_at,
        expires_at = EXCLUDED.expires_at, released_at = NULL
    WHERE l.expires_at <= clock_timestamp()
    RETURNING token)
SELECT token, NULL::float AS seconds FROM taken
UNION ALL
SELECT NULL, extract(epoch FROM expires_at - clock_timestamp()) FROM {TABLE}
WHERE key = %(key)s AND NOT EXISTS (SELECT FROM taken)
"""
OURS = "key = %(key)s AND holder = %(holder)s AND token = %(token)s AND released_at IS NULL"
RENEW = f"""
UPDATE {TABLE} SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + %(ttl)s::interval,
    ttl = %(ttl)s::interval
WHERE {OURS} AND expires_at > clock_timestamp() RETURNING token
"""
#: With ``min_hold``, a released lease does not expire before it has been held for that time.
RELEASE = f"""
WITH freed AS (
    UPDATE {TABLE} SET released_at = clock_timestamp(),
        expires_at = greatest(clock_timestamp(), acquired_at + %(min_hold)s::interval)
    WHERE {OURS} AND (expires_at IS NULL OR expires_at > clock_timestamp()) RETURNING key)
SELECT key, pg_notify('{CHANNEL}', key::text) FROM freed
"""
#: After an ACQUIRE whose answer was lost. The holder's id belongs to only one attempt.
UNDO = f"UPDATE {TABLE} SET released_at = clock_timestamp(), expires_at = clock_timestamp() WHERE holder = %(holder)s"
