"""The migrations of a later version of the package: its own, and one that changes nothing."""
