"""The one exception type that reaches users."""


class EmberdError(Exception):
    """Something the user can act on: the message says what was wrong, where, and what to do."""


class NoFiniteLogits(EmberdError):  # noqa: N818
    """There is nothing to choose a token from."""

    def __init__(self) -> None:
        super().__init__("the model produced no finite logits; the artifact may be damaged")
