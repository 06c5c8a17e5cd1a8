"""The child: the process that runs tasks. It claims, runs and settles."""
