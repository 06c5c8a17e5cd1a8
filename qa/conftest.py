"""The fixtures and rules of the contributor's suite hold here, too."""

from tests.conftest import *  # noqa: F403
