"""Running: from a claim to its outcome, in threads and in the event loop."""
