"""What a client is told when its request fails, in OpenAI's shape."""

from __future__ import annotations

from emberd.daemon.errors import EmberdError


class ApiError(EmberdError):
    """An answer with an HTTP status other than 200."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status == 401:
            kind = "authentication_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }
