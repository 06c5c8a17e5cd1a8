"""The code that docs/admin.md shows, as it is. The tests run it."""
