"""A folder for PYTHONPATH: programs that run with it have a wrong clock."""
