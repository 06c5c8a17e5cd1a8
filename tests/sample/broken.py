"""A module of an installed app that cannot be imported: it is a script."""

import sys

sys.exit("tests.sample.broken is a script")
