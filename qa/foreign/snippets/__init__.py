"""The code that docs/telemetry.md shows, as it is. The tests run it."""
