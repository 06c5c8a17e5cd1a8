"""An app that has something to say to each new session."""
