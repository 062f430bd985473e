"""What can be wrong with settings."""


class ConfigError(ValueError):
    """A setting that cannot be honoured; the message is one line for the user."""
