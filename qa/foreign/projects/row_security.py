"""Row-level security by a setting of the session, which a middleware sets for each request."""

from qa.foreign.base import *  # noqa: F403
from qa.foreign.base import DATABASES

DATABASES["app"] = {**DATABASES["default"], "USER": "shop", "TEST": {}}
DATABASES["default"], DATABASES["owner"] = DATABASES["app"], DATABASES["default"]
MIDDLEWARE = ["qa.foreign.row_security.UserMiddleware"]
BEFORE_MIGRATING = "CREATE ROLE shop LOGIN"
MIGRATE = ("migrate", "--database", "owner")
