"""What goes wrong on one host."""

from __future__ import annotations

from trainer.errors import OUT_OF_REACH, UserError


class HostError(UserError):
    """A host that cannot be used, and what can be done about it; `is_lost`: it may be back in a moment."""

    def __init__(self, host: str, what: str, hint: str = "", is_lost: bool = False) -> None:
        super().__init__(f"{host}: {what}", hint, OUT_OF_REACH)
        self.host, self.what, self.is_lost = host, what, is_lost
