"""A database backend with a pool of its own."""
