"""Execute wrappers of a project's own, as Django documents them."""

from tests.foreign.base import *  # noqa: F403
