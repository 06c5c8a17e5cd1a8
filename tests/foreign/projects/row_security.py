"""Row-level security by a setting of the session, which a middleware sets for each request."""

from tests.foreign.base import *  # noqa: F403
from tests.foreign.base import DATABASES

DATABASES["app"] = {**DATABASES["default"], "USER": "shop", "TEST": {}}
DATABASES["default"], DATABASES["owner"] = DATABASES["app"], DATABASES["default"]
MIDDLEWARE = ["tests.foreign.row_security.UserMiddleware"]
BEFORE_MIGRATING = "CREATE ROLE shop LOGIN"
MIGRATE = ("migrate", "--database", "owner")
