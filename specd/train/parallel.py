"""Several processes train one model: torchrun starts them, each takes its share of the forwards of a step.

    groups of a step --share--> own forwards --> gradients and rows, summed over ranks --> the same step everywhere

What a step learns from does not depend on the number of ranks, so neither does the result, but for the order of sums.
`ReplicatedModel` (DDP) holds all of it on each rank; `ShardedModel` (FSDP2, as ZeRO-2: gathered once a step) holds
weights, gradients and moments in slices. The target's embedding and output head are whole everywhere.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from specd.errors import ConfigError, RankError

Loss = Callable[[Any], torch.Tensor]  # one forward's, of the model
_Item = TypeVar("_Item")
_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """The processes of this run. One process is a run of one rank, and has no process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def share(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """This rank's: every size-th."""
        return items[self.rank :: self.size]

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Around collectives: RankError in place of what they raise, a plain RuntimeError when a connection breaks."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} of {self.size} failed, or lost another rank: {error}") from error

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Over all ranks, in place, with the same bits on each."""
        if self.size > 1:
            with self.meeting():
                for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                    assert work is not None
                    work.wait()

    def highest(self, number: int) -> int:
        """Of all ranks'."""
        tensor = torch.tensor(number)
        if self.size > 1:
            with self.meeting():
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def total(self, number: float) -> float:
        """Over all ranks; exact for whole numbers."""
        tensor = torch.tensor(float(number), dtype=torch.float64)
        self.sum([tensor])
        return float(tensor)

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Rank 0's values to all, in place."""
        if self.size > 1:
            with self.meeting():
                for tensor in tensors.values():
                    dist.broadcast(tensor, src=0)

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Raises ConfigError on every rank when one started with something else, naming the first difference."""
        if self.size == 1:
            return
        others: list[Any] = [None] * self.size
        with self.meeting():
            dist.all_gather_object(others, dict(values))
        for rank, other in enumerate(others):
            for name, value in others[0].items():
                if other[name] != value:
                    raise ConfigError(f"rank {rank} has {name} {other[name]!r}, rank 0 {value!r}: they must agree")


def check_share(ranks: Ranks, *, accumulate: int, shard: str) -> None:
    """Raises ConfigError when there is not a forward for every rank, or nobody to share with."""
    if accumulate < ranks.size:
        words = f"--accumulate {accumulate}: {ranks.size} ranks share the forwards of a step"
        raise ConfigError(f"{words}; give at least {ranks.size}")
    if shard == "fsdp" and ranks.size == 1:
        raise ConfigError("--shard fsdp: one process has nothing to share; start several with torchrun")


def world() -> tuple[int, int]:
    """(rank, number of ranks) of this process as torchrun's environment tells it. Raises ConfigError."""
    size = _number("WORLD_SIZE", "1")
    if size < 2:
        return 0, 1
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE={size} without {', '.join(missing)}: start the ranks with torchrun")
    rank = _number("RANK", "")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank}: must be below WORLD_SIZE={size}")
    return rank, size


def _number(name: str, default: str) -> int:
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise ConfigError(f"{name}={value!r}: not a whole number")
    return int(value)


@contextlib.contextmanager
def joined(timeout_s: float) -> Iterator[Ranks]:
    """The ranks of torchrun's environment. A collective that takes longer than timeout_s ends this process.

    Raises ConfigError for an environment that cannot be used, RankError when the ranks do not meet or lose each other.
    """
    rank, size = world()
    ranks = Ranks(rank, size)
    if size == 1:
        yield ranks
        return
    with ranks.meeting():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    try:
        yield ranks
    finally:
        dist.destroy_process_group()  # the others see that this rank is gone and do not wait for the time limit


class Trainable(Protocol):
    """A model as a function of these."""

    weights: Mapping[str, torch.Tensor]  # by name, f32 leaves with requires_grad


class ParallelModel(Protocol):
    """A model whose gradients are those of all ranks."""

    model: Trainable  # whole weights inside a Loss and inside `whole()`
    parameters: Mapping[str, torch.Tensor]  # by name, what this rank's optimizer steps

    def backward(self, losses: Sequence[Loss]) -> float:
        """Fresh gradients: the sum of all ranks' losses'. Gives this rank's sum of losses."""
        ...

    def clip(self, limit: float) -> float:
        """Scales the gradients to that norm at most; gives what it was."""
        ...

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """For forwards without gradients, as many as this rank likes."""
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter or its moment, whole. All ranks take part."""
        ...

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor that belongs to that parameter."""
        ...


class ReplicatedModel:
    """The whole model on each rank; gradients are summed once a step."""

    def __init__(self, model: Trainable, ranks: Ranks) -> None:
        self.model, self._ranks = model, ranks
        self.parameters: Mapping[str, torch.Tensor] = model.weights

    def backward(self, losses: Sequence[Loss]) -> float:
        total = 0.0
        for weight in self.parameters.values():
            weight.grad = torch.zeros_like(weight)
        for loss in losses:
            value = loss(self.model)
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        self._ranks.sum([weight.grad for weight in self.parameters.values() if weight.grad is not None])
        return total

    def clip(self, limit: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit))

    def whole(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Module(torch.nn.Module):
    """A model's weights as parameters, which is what FSDP2 shards; the model reads them back at every access."""

    def __init__(self, model: Trainable) -> None:
        super().__init__()
        self.model = model
        self.names = {name: name.replace(".", "/") for name in model.weights}  # a parameter's name has no dots
        for name, weight in model.weights.items():
            self.register_parameter(self.names[name], torch.nn.Parameter(weight.detach()))
        model.weights = _Live(self)

    def forward(self, loss: Loss) -> torch.Tensor:
        return loss(self.model)


class _Live(Mapping[str, torch.Tensor]):
    """The module's parameters as they are now: whole between FSDP2's gathering and its resharding."""

    def __init__(self, module: _Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter: torch.Tensor = getattr(self._module, self._module.names[name])
        return parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._module.names)

    def __len__(self) -> int:
        return len(self._module.names)


class ShardedModel:
    """A slice of every weight on each rank. Every rank runs as many forwards as the others: each is a collective."""

    def __init__(self, model: Trainable, ranks: Ranks) -> None:
        self.model, self._ranks = model, ranks
        module = _Module(model)
        with ranks.meeting():
            self._mesh = init_device_mesh("cpu", (ranks.size,))
        sharded = fully_shard(module, mesh=self._mesh, reshard_after_forward=False)
        assert isinstance(sharded, FSDPModule)
        self._module: FSDPModule = sharded
        # Sums, not means: a step is divided by its rows. gloo has neither of FSDP2's other two ways to divide.
        self._module.set_gradient_divide_factor(1.0)
        self._module.set_force_sum_reduction_for_comms(True)
        self.parameters: Mapping[str, torch.Tensor] = dict(model.weights)

    def backward(self, losses: Sequence[Loss]) -> float:
        """A rank with fewer losses than another takes part in its last forwards with a loss of zero."""
        for parameter in self.parameters.values():
            parameter.grad = None
        count, total = self._ranks.highest(len(losses)), 0.0
        for index in range(count):
            self._module.set_requires_gradient_sync(index == count - 1)
            with self._ranks.meeting():
                self._module.unshard()  # else inside the forward, whose own errors are none of the ranks'
            value = self._module(losses[index] if index < len(losses) else _nothing)  # type: ignore[operator]
            with self._ranks.meeting():  # the last one's gradients are summed inside
                value.backward()
            total += float(value.detach())
        return total

    def clip(self, limit: float) -> float:
        with self._ranks.meeting():
            norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit)
            return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        with self._ranks.meeting():
            self._module.unshard()
        try:
            yield
        finally:
            self._module.reshard()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        with self._ranks.meeting():
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        parameter = self.parameters[name]
        assert isinstance(parameter, DTensor)
        with self._ranks.meeting():
            return distribute_tensor(tensor, self._mesh, parameter.placements)


def _nothing(model: Trainable) -> torch.Tensor:
    return torch.stack([0 * weight.sum() for weight in model.weights.values()]).sum()


def parallel_model(model: Trainable, ranks: Ranks, shard: str) -> ParallelModel:
    """shard: "ddp" or "fsdp" (which wants several ranks). Every rank starts from rank 0's weights."""
    ranks.broadcast({name: weight.detach() for name, weight in model.weights.items()})
    return ShardedModel(model, ranks) if shard == "fsdp" else ReplicatedModel(model, ranks)
