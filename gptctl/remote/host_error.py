"""The error that all code for one host raises."""

from __future__ import annotations

from trainer.errors import OUT_OF_REACH, UserError


class HostError(UserError):
    """A host cannot be used. `is_lost`: the connection failed, and a later try may succeed."""

    def __init__(self, host: str, what: str, hint: str = "", is_lost: bool = False) -> None:
        # `what` stays available without the name: tables show the host in a column of its own.
        super().__init__(f"{host}: {what}", hint, OUT_OF_REACH)
        self.host, self.detail, self.is_lost = host, what, is_lost
