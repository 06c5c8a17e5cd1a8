"""A module that no process should import. If a row makes a process import it, the module records that."""

raise RuntimeError("tests.evil was imported")
