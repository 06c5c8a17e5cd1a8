"""The statements about leases: acquire, renew, release. All times are the database's."""

from __future__ import annotations

TABLE = '"django_pglock_lease"'
#: The channel for released leases. The payload is the lease's key.
CHANNEL = "django_pglock_lease"
#: Set explicitly, because the role may have another default. At a higher level, one of two concurrent sessions would
#: fail.
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;"
# Whether a lease is free: it has expired, or its expiry is the date of its release, however the clock was set since. A
# lease without a ttl has no expiry.
_IS_FREE = "l.expires_at <= GREATEST(now.t, l.released_at)"
# How far the last date that was written into a lease is ahead of the clock.
_AHEAD = "(GREATEST(l.renewed_at, l.released_at) - now.t)"
#: Acquires a lease that is free. If another holder has the lease, the last SELECT returns the seconds until its expiry.
#: If the clock was put back since the lease was renewed or released, all of its dates are put back, too, as if that had
#: been now. So a dead holder keeps the lease for one ttl more, and not until the clock has caught up.
ACQUIRE = f"""
WITH now AS MATERIALIZED (SELECT clock_timestamp() AS t), put_back AS (
    UPDATE {TABLE} AS l SET acquired_at = acquired_at - {_AHEAD}, renewed_at = renewed_at - {_AHEAD},
        expires_at = expires_at - {_AHEAD}, released_at = released_at - {_AHEAD}
    FROM now WHERE key = %(key)s AND {_AHEAD} > interval '1 second' AND NOT {_IS_FREE}
), taken AS (
    INSERT INTO {TABLE} AS l (key, name, owner, holder, token, ttl, acquired_at, renewed_at, expires_at)
    SELECT %(key)s, %(name)s, %(owner)s, %(holder)s, 1, %(ttl)s::interval, t, t,
        t + %(ttl)s::interval
    FROM now
    ON CONFLICT (key) DO UPDATE SET name = EXCLUDED.name, owner = EXCLUDED.owner, holder = EXCLUDED.holder,
        token = l.token + 1, ttl = EXCLUDED.ttl, acquired_at = EXCLUDED.acquired_at, renewed_at = EXCLUDED.renewed_at,
        expires_at = EXCLUDED.expires_at, released_at = NULL
    WHERE l.expires_at <= GREATEST((SELECT t FROM now), l.released_at)
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
WITH now AS MATERIALIZED (SELECT clock_timestamp() AS t), freed AS (
    UPDATE {TABLE} SET released_at = t, expires_at = greatest(t, least(t, acquired_at) + %(min_hold)s::interval)
    FROM now WHERE {OURS} AND (expires_at IS NULL OR expires_at > t) RETURNING key)
SELECT key, pg_notify('{CHANNEL}', key::text) FROM freed
"""
#: After an ACQUIRE whose answer was lost. The holder's id belongs to only one attempt.
UNDO = f"""
UPDATE {TABLE} SET released_at = t, expires_at = t FROM (SELECT clock_timestamp() AS t) AS now
WHERE holder = %(holder)s
"""
