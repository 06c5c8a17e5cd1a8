"""A module that no process has a reason to import: a row that could make one do it would be heard here."""

raise RuntimeError("tests.evil was imported")
