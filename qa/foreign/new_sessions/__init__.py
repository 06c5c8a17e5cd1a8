"""An app with a receiver of ``connection_created``."""
