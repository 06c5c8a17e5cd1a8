"""Execute wrappers of a project's own, as Django documents them."""

from qa.foreign.base import *  # noqa: F403
