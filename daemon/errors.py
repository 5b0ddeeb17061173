"""The one exception type that reaches users."""


class EmberdError(Exception):
    """Something the user can act on: the message says what was wrong, where, and what to do."""
