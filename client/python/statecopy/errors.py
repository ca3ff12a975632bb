"""What goes wrong, as exceptions: one class for each family of the closed list of refusals (contract: Refusals)."""

from __future__ import annotations

from typing import Literal

__all__ = [
    "ArgumentError",
    "CapacityError",
    "ClosedError",
    "DeadlineExceeded",
    "DeviceLost",
    "Error",
    "ForkedError",
    "HandleError",
    "PlanError",
    "SessionError",
    "Unavailable",
]

Leaves = Literal["nothing_moved", "per_row", "unknown"]


class Error(RuntimeError):
    """Why a call failed.

    ``code`` is the refusal's name in the closed list (``"STALE_PLAN"``), or None where the list has none. ``remedy`` says
    what to do. ``about`` names the argument, layer or limit, where there is one. ``leaves`` says what a copy that failed
    this way leaves behind: after ``"unknown"`` the rows named are undefined until they are written whole again.
    """

    code: str | None
    remedy: str
    leaves: Leaves
    about: str | None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        remedy: str = "",
        leaves: Leaves = "nothing_moved",
        about: str | None = None,
    ) -> None:
        # What the message says already is not said twice.
        says_so = remedy.rstrip(".").casefold() in message.casefold()
        super().__init__(_headed(code, message) if says_so else f"{_headed(code, message)} {remedy}")
        self.code = code
        self.remedy = remedy
        self.leaves = leaves
        self.about = about


def _headed(code: str | None, message: str) -> str:
    sentence = message if message.endswith((".", "!", "?")) else f"{message}."
    return sentence if code is None else f"{code}: {sentence}"


class ArgumentError(Error, ValueError):
    """An argument that does not fit: its type, shape, device, or a value past a limit."""


class PlanError(Error):
    """The plan cannot be used, or none could be made: not sealed, stale, of another layout, not compiled."""


class HandleError(Error):
    """Memory that cannot be shared with the daemon, or is not what it was."""


class SessionError(Error):
    """The daemon and this client do not belong together: another user, version or life of the daemon."""


class CapacityError(Error):
    """A stated limit was reached, or the daemon has too much to do now."""


class DeadlineExceeded(Error):
    """The request did not start in time, and never will."""


class Unavailable(Error):
    """The daemon is gone, about to end, or cannot be reached."""


class DeviceLost(Error):
    """The device failed under the copy."""


class ClosedError(Error):
    """The client was closed."""


class ForkedError(ClosedError):
    """The client belongs to the parent of this process."""


_FAMILIES: dict[str, type[Error]] = {
    "NOT_SEALED": PlanError,
    "STALE_PLAN": PlanError,
    "SIGNATURE_MISMATCH": PlanError,
    "LAYOUT_INVALID": ArgumentError,
    "SELECTED_TOO_LARGE": ArgumentError,
    "INDEX_TYPE": ArgumentError,
    "FLAGS_MISMATCH": ArgumentError,
    "PACKED_MISMATCH": ArgumentError,
    "OVERLAP": ArgumentError,
    "OUT_OF_REGION": ArgumentError,
    "ROW_INVALID": ArgumentError,
    "REGION_UNKNOWN": HandleError,
    "HANDLE_INVALID": HandleError,
    "HANDLE_UNSUPPORTED": HandleError,
    "DEVICE_NOT_VISIBLE": HandleError,
    "SESSION_UNKNOWN": SessionError,
    "INCARNATION_MISMATCH": SessionError,
    "PERMISSION_DENIED": SessionError,
    "VERSION_MISMATCH": SessionError,
    "CONFIGURATION_DRIFT": PlanError,
    "HOOK_PRESENT": PlanError,
    "PREPARE_FAILED": PlanError,
    "QUOTA_EXCEEDED": CapacityError,
    "OVERLOADED": CapacityError,
    "LEASE_UNAVAILABLE": CapacityError,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "DEVICE_LOST": DeviceLost,
    "DRAINING": Unavailable,
    "UNAVAILABLE": Unavailable,
}


def _of(family: str | None, code: str | None, message: str, remedy: str, leaves: Leaves, about: str | None) -> Error:
    """The exception of a failure that the extension met; ``family`` where the code does not tell."""
    by_code = Error if code is None else _FAMILIES.get(code, Error)
    made = by_code if family is None else _BY_NAME[family]
    return made(message, code=code, remedy=remedy, leaves=leaves, about=about)


_BY_NAME: dict[str, type[Error]] = {
    made.__name__: made for made in (Error, ArgumentError, HandleError, ClosedError, ForkedError)
}
