"""How a step's inputs get from the host to the device: through one function, into fresh tensors or persistent ones.

On CUDA nothing may be allocated per step and a captured graph reads fixed addresses, so a step's inputs live in one of
two alternating frames: step n + 2 overwrites what step n read. Whoever reads a frame later than that reads another
step's inputs; the chaos device uses frames on the CPU to show it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

_POISON = -(1 << 30)


class Upload(Protocol):
    """Host array to device tensor. `name` tells the inputs of one step apart."""

    def __call__(self, name: str, array: npt.NDArray[Any]) -> torch.Tensor: ...


def fresh_upload(device: torch.device) -> Upload:
    """A new tensor each time (on a CPU: the array's own memory)."""

    def upload(name: str, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    return upload


class Frame:
    """Persistent buffers by name; an Upload. A buffer grows to the next power of two when an input outgrows it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, array: npt.NDArray[Any]) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < host.numel() or buffer.dtype != host.dtype:
            size = 1 << max(host.numel() - 1, 15).bit_length()
            buffer = self._buffers[name] = torch.empty(size, dtype=host.dtype, device=self._device)
        view = buffer[: host.numel()].view(host.shape)
        view.copy_(host, non_blocking=True)
        return view

    def poison(self) -> None:
        """Overwrites everything: a late reader gets indices that do not exist."""
        with torch.inference_mode():  # the streams made them in it
            for buffer in self._buffers.values():
                buffer.fill_(_POISON)


class Frames:
    """Two frames, taken in turn by the steps."""

    def __init__(self, device: torch.device, *, poisons: bool = False) -> None:
        self._frames = (Frame(device), Frame(device))
        self._poisons = poisons

    def of(self, step: int) -> Frame:
        return self._frames[step % 2]

    def retire(self, step: int) -> None:
        """The step is over; nobody may read its inputs any more."""
        if self._poisons:
            self.of(step).poison()
