"""The mutex: rows of a table as locks, with owners, time limits, states, retries and queues."""
