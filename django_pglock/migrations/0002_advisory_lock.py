"""A view over PostgreSQL's own lock table. It stores nothing; dropping it loses nothing."""

from django.db import migrations, models
from django_pglock.migrations._operations import CreateView

# Keys are locks of one bigint (objsubid 1), put together as PostgreSQL took them apart, and right for negative ones. The
# package's own locks are of two ints (objsubid 2), and the first of them says what they are for (keys/reserved.py). They have
# no key: put together in the same way they would be shown as the lock of one bigint that has the same 64 bits.
# Names come from the comments that lock statements, and the statements of who holds locks, begin with; each says which
# key it is about. A waiter's comment names its holder's lock as well.
VIEW = r"""
CREATE VIEW "django_pglock_advisorylock" AS
WITH held AS (
    SELECT l.classid::bigint AS class, l.objid::bigint AS number, l.objsubid AS space,
           CASE WHEN l.objsubid = 1 THEN (l.classid::bigint << 32) | l.objid::bigint END AS key,
           CASE l.mode WHEN 'ShareLock' THEN 'shared' ELSE 'exclusive' END AS mode,
           l.granted AS is_granted, l.pid, l.waitstart,
           a.application_name, a.state, a.usename::text AS username, a.client_addr::text AS client_address, a.query,
           a.xact_start, a.query_start
    FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
    WHERE l.locktype = 'advisory'
      AND (l.objsubid = 1 OR l.objsubid = 2 AND l.classid IN (1885826049, 1885826050, 1885826051))
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
SELECT pid || '-' || COALESCE(key::text, class || '.' || number) || '-' || mode
           || CASE WHEN is_granted THEN '' ELSE '-waiting' END AS id,
       key,
       COALESCE(
           max(replace(substring(query FROM '/\* django_pglock:' || key || ' (.*?) \*/'), '％', '%')) OVER (PARTITION BY space, class, number),
           CASE WHEN space = 2 THEN CASE class
               WHEN 1885826049 THEN 'upkeep of tasks'
               WHEN 1885826050 THEN 'admission of tasks'
               WHEN 1885826051 THEN 'worker ' || COALESCE({worker}, number::text) END END
       ) AS name,
       mode, is_granted, pid,
       (count(*) FILTER (WHERE NOT is_granted) OVER (PARTITION BY space, class, number))::int AS waiters,
       CASE WHEN is_granted THEN '[]'::jsonb ELSE to_jsonb(pg_blocking_pids(pid)) END AS blocked_by,
       CASE WHEN is_granted THEN COALESCE(xact_start, query_start) ELSE waitstart END AS since,
       COALESCE(application_name, '') AS application_name, state, username, client_address, query
FROM held
"""
# The row of a worker that died may have the same number.
WORKER = """(
    SELECT w.name FROM "django_pglock_worker" AS w
    WHERE w.lock_key = held.number ORDER BY w.heartbeat_at DESC LIMIT 1)"""


class Migration(migrations.Migration):

    dependencies = [
        ('django_pglock', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='AdvisoryLock',
            fields=[
                ('id', models.TextField(primary_key=True, serialize=False)),
                ('key', models.BigIntegerField(help_text="Empty: a lock of this package's own.", null=True, verbose_name='key')),
                ('name', models.TextField(null=True, verbose_name='name')),
                ('mode', models.CharField(max_length=16, verbose_name='mode')),
                ('is_granted', models.BooleanField(verbose_name='held')),
                ('pid', models.IntegerField(verbose_name='session')),
                ('waiters', models.IntegerField(help_text='Sessions that wait for this key.', verbose_name='waiters')),
                ('blocked_by', models.JSONField(help_text='Sessions that this one waits for.', verbose_name='blocked by')),
                ('since', models.DateTimeField(help_text='Waiting since; for a holder, start of its transaction or last statement.', null=True, verbose_name='since')),
                ('application_name', models.TextField(verbose_name='application')),
                ('state', models.TextField(null=True, verbose_name='state')),
                ('username', models.TextField(null=True, verbose_name='user')),
                ('client_address', models.TextField(null=True, verbose_name='client')),
                ('query', models.TextField(null=True, verbose_name='last statement')),
            ],
            options={
                'required_db_vendor': 'postgresql',
                'verbose_name': 'advisory lock',
                'verbose_name_plural': 'advisory locks',
                'db_table': 'django_pglock_advisorylock',
                'ordering': ['key', '-is_granted', 'since', 'pid'],
                'permissions': [('terminate_advisorylock', 'Can end sessions that hold or wait for advisory locks')],
                'managed': False,
                'base_manager_name': 'for_dumpdata',
                'default_permissions': ('view',),
            },
            managers=[
                ('for_dumpdata', models.Manager()),
            ],
        ),
        CreateView('advisorylock', VIEW, {'worker': ('worker', WORKER)}),
    ]
