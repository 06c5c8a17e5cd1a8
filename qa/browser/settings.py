"""A site with a strict policy, on which each user is the administrator."""

from tests.settings import *  # noqa: F403
from tests.settings import MIDDLEWARE

MIDDLEWARE = [*MIDDLEWARE, "qa.browser.site.strict_and_logged_in"]
ROOT_URLCONF = "qa.browser.site"
