"""A program: to import it is to run it."""

raise RuntimeError("tests.sample.__main__ was run")
