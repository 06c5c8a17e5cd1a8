"""django-db-connection-pool, whose backend takes its sessions from a pool of SQLAlchemy."""

import warnings

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import DATABASES

# psycopg asks SQLAlchemy's object for an attribute that has another name now.
warnings.filterwarnings("ignore", message="The _ConnectionFairy.connection attribute is deprecated")

DATABASES["default"] |= {
    "ENGINE": "dj_db_conn_pool.backends.postgresql",
    "CONN_MAX_AGE": 0,
    "POOL_OPTIONS": {"POOL_SIZE": 2, "MAX_OVERFLOW": 60, "TIMEOUT": 10},
}
