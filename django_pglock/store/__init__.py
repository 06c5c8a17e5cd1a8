"""The rows of tasks, and every statement about them. One verb, one file."""
