"""The parent: starts the children that run tasks, beats and listens for them, and does the upkeep. It runs no tasks."""
