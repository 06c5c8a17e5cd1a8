"""The package beside real packages from PyPI, each in a process and a project of its own. See README.md."""
