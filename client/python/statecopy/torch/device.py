"""From torch's name of a device to the UUID that a session is opened for."""

from __future__ import annotations

from typing import Any

import torch

from statecopy.errors import ArgumentError


def find(device: torch.device | str | int | None) -> tuple[str | None, int | None]:
    """The UUID, and the index among this process's CUDA devices; None for each that is not told by the name.

    ``None`` and ``"cpu"`` leave the choice to the daemon. A string that is no device of torch is a UUID already.
    """
    if device is None:
        return None, None
    if isinstance(device, str):
        uuid = device
        try:
            device = torch.device(device)
        except RuntimeError:
            return uuid, None
    elif isinstance(device, int):
        device = torch.device("cuda", device)
    if device.type == "cpu":
        return None, None
    if device.type != "cuda":
        raise ArgumentError(
            f"device is {device}, whose UUID torch does not tell",
            remedy="Give the device's UUID as a string, or None for the daemon's only device.",
            about="device",
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if not 0 <= index < torch.cuda.device_count():
        raise ArgumentError(
            f"device is {device}; this process sees {torch.cuda.device_count()} CUDA devices",
            code="DEVICE_NOT_VISIBLE",
            remedy="Look at CUDA_VISIBLE_DEVICES.",
            about="device",
        )
    properties: Any = torch.cuda.get_device_properties(index)
    return str(properties.uuid), index


def of_states(states: dict[str, torch.Tensor]) -> int | None:
    """The CUDA device that all states are on; None on the host.

    Raises ``ArgumentError`` when they are on several devices, or one is no strided tensor of the host or of CUDA.
    """
    devices: dict[torch.device, str] = {}
    for name, state in states.items():
        if not isinstance(state, torch.Tensor):
            raise ArgumentError(
                f"{name} is a {type(state).__name__}; it must be a torch tensor",
                remedy="Use statecopy.connect for tensors of other libraries.",
                about=name,
            )
        devices.setdefault(state.device, name)
    if len(devices) > 1:
        placed = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ArgumentError(
            f"The states are on {len(devices)} devices: {placed}; a client has one",
            remedy="Connect a client for each device.",
            about="tensors",
        )
    return next((device.index for device in devices if device.type == "cuda"), None)
