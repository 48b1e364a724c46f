"""Row-wise functions of several passes, a few rows at a time on a CPU: the passes then run in the cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

_ELEMENTS_IN_CACHE = 1 << 17


def in_blocks(fn: Callable[..., torch.Tensor], *tensors: torch.Tensor, width: int) -> torch.Tensor:
    """fn(*tensors), given that each row of the result depends on the same row of the arguments alone.

    width: elements a row of fn's intermediate values. On any other device than a CPU this is one call.
    """
    rows = len(tensors[0])
    block = max(_ELEMENTS_IN_CACHE // max(width, 1), 1)
    if tensors[0].device.type != "cpu" or rows <= block:
        return fn(*tensors)
    return torch.cat([fn(*part) for part in zip(*(torch.split(tensor, block) for tensor in tensors), strict=True)])
