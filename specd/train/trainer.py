"""The loop of a training run, whatever is trained.

    epoch -> steps of `accumulate` batches -> loss of the task -> AdamW -> every so often: held-out figures, checkpoint,
    and the model's folder when it is the best so far by the drafts that greedy verification keeps

A run that finds a checkpoint in its output folder (`folder.py`) goes on from it. Under torchrun the ranks share the
forwards of each step (`parallel.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from specd.errors import ConfigError
from specd.train.batches import Batch, epoch_batches, evenly, follows, make_batch, sequences
from specd.train.checkpoint import checkpoint_tensors, load_checkpoint, read_state, save_checkpoint
from specd.train.corpus import HELD_OUT_EVERY
from specd.train.folder import RunFolder, without_place
from specd.train.parallel import Ranks, check_share, joined, parallel_model
from specd.train.plan import Settings, defaults, identity
from specd.train.plot import draw
from specd.train.run import Figures, Vocabulary, add_figures
from specd.train.shards import Collected, read_shards
from specd.train.target import FrozenTarget, read_frozen, weights_fingerprint

_DRAW_EVERY_S = 60.0


class Task(Protocol):
    """What is trained: a model whose `weights` are f32 leaves, and what is asked of it."""

    name: str  # of the folder that the best one is written to
    model: Any
    vocabulary: Vocabulary
    learned: torch.Tensor  # bool[N] rows of the shards whose next token is learned
    passes: int  # of a batch that is trained on
    summary: str  # said when a run begins

    def loss(self, model: Any, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        """Summed over the batch's rows."""
        ...

    def outputs(self, model: Any, batch: Batch, passes: int) -> torch.Tensor:
        """[P, R, H]: what the output head reads, to say the batch's rows in every position of a draft."""
        ...

    def write(self, path: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """The folder that serves."""
        ...

    def provenance(self) -> Mapping[str, Any]:
        """What is written down beside settings, data and figures."""
        ...


def check_data(data: Collected, target: FrozenTarget, *, shards: tuple[Path, ...], model: Path) -> None:
    """Raises ConfigError for shards of another target, or with nothing to train on or to hold out."""
    folders = " ".join(map(str, shards))
    if data.origin.fingerprint != weights_fingerprint(model):
        raise ConfigError(f"{folders}: were collected from {data.origin.target}, not from {model}")
    for held_out in (False, True):
        if not sequences(data, held_out=held_out):
            kind = "held out" if held_out else "to train on"
            advice = f"one of {HELD_OUT_EVERY} is held out: collect more texts"
            raise ConfigError(f"{folders}: no sequence is {kind}; {advice}")
    width = target.config.hidden_size
    if data.hidden.shape[1] != width:
        raise ConfigError(f"{folders}: hold states of {data.hidden.shape[1]} numbers, {target.name} has {width}")
    wanted = width * (3 if data.origin.features == "aux" else 1)
    if data.features.shape[1] != wanted:
        raise ConfigError(f"{folders}: hold features of {data.features.shape[1]} numbers, {target.name} has {wanted}")
    highest = max(int(data.ids.max()), int(data.best.max()))
    if highest >= target.vocab_size:
        raise ConfigError(f"{folders}: hold token {highest}; {target.name} has {target.vocab_size} tokens")


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """ "bf16" is several times as fast where the CPU has matrix instructions (AMX), and only there or on avx512_bf16
    different from "fp32"."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if precision == "bf16" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def run_training(settings: Settings, make_task: Callable[[Collected, FrozenTarget], Task]) -> dict[str, Any]:
    """Trains to the end, or goes on where the output folder's checkpoint stands. Gives the best held-out figures.

    settings also name the target (`model`) and the folders of `shards`. Raises ConfigError, ModelError, and RankError
    when one of several ranks fails.
    """
    plan = settings.plan
    with joined(plan.rank_timeout) as ranks, matmul_precision(plan.precision):
        data = read_shards(*settings.shards)
        target = read_frozen(settings.model)
        check_data(data, target, shards=settings.shards, model=settings.model)
        trainer = Trainer(settings, data, make_task(data, target), ranks)
        trainer.resume()
        return trainer.train()


def render(record: Mapping[str, Any]) -> str:
    """The best held-out figures for people."""
    report = record["held_out"]
    lines = [f"best at step {record['step']}, {record['kept']} drafts kept of {len(report['top1'])} by greedy decoding"]
    lines += [f"{name:8}" + "".join(f"{value:9.4f}" for value in report[name]) for name in ("top1", "overlap", "loss")]
    return "\n".join(lines)


class Trainer:
    """One training run: everything that a step reads and changes."""

    def __init__(self, settings: Settings, data: Collected, task: Task, ranks: Ranks) -> None:
        plan = settings.plan
        check_share(ranks, accumulate=plan.accumulate, shard=plan.shard)
        self.plan, self.data, self.task, self.ranks = plan, data, task, ranks
        self.identity, self.defaults = identity(settings) | {"data": data.fingerprint}, defaults(settings)
        self.folder = RunFolder(plan.output, best=task.name, writes=ranks.first)
        self.train_set = sequences(data, held_out=False)
        if plan.train_tokens:
            self.train_set = evenly(self.train_set, data.lens, plan.train_tokens)
        self.held_out = evenly(sequences(data, held_out=True), data.lens, plan.eval_tokens)
        self.answers = follows(data)
        for chosen, what in ((self.train_set, "to train on"), (self.held_out, "held out")):
            if not _predicts(data, chosen, self.answers):
                raise ConfigError(f"{' '.join(map(str, settings.shards))}: no token that is learned is {what}")
        self.parallel = parallel_model(task.model, ranks, plan.shard)
        self.optimizer = torch.optim.AdamW(
            list(self.parallel.parameters.values()), lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay
        )
        self.step, self.tokens, self.best = 0, 0, -1.0
        self.best_figures: dict[str, Any] = {}
        self.drawn_s = time.monotonic()
        self.steps_per_epoch = len(self._steps(0))
        self.total = plan.epochs * self.steps_per_epoch

    def resume(self) -> None:
        """From the output folder's checkpoint, if there is one. Raises ConfigError when it is of another run."""
        path = self.folder.checkpoint
        if not path.exists():
            self.ranks.check_same(self.identity | {"step": 0})
            self.folder.begin(None)
            return
        state = read_state(path)
        found = self.defaults | state["identity"]
        for name, value in self.identity.items():
            if found.get(name) != value:
                raise ConfigError(
                    f"{path}: was made with {name} {found.get(name)!r}, not {value!r}; "
                    "give the same settings, or another --output"
                )
        self.ranks.check_same(self.identity | {"step": state["step"]})
        load_checkpoint(path, self.parallel, self.optimizer, state["step"])
        self.step, self.tokens, self.best = state["step"], state["tokens"], state["best"]
        self.best_figures = state["best_figures"]
        self.folder.begin(self.step)
        self.folder.say(f"going on from step {self.step} of {self.total}")

    def train(self) -> dict[str, Any]:
        """To the end, or to plan.stop_after. Gives the best held-out figures."""
        plan = self.plan
        self.folder.say(f"{self.total} steps on {self.ranks.size} rank(s); {self.task.summary}")
        stop = min(self.total, plan.stop_after or self.total)
        if self.step == 0:
            self._evaluate()
        started, before = time.monotonic(), self.tokens
        while self.step < stop:
            epoch, index = divmod(self.step, self.steps_per_epoch)
            steps = self._steps(epoch)
            # Padding differs from epoch to epoch: all have as many steps as the first, dropped or repeated.
            while index < self.steps_per_epoch and self.step < stop:
                record = self._train_step(steps[index % len(steps)])
                seconds = time.monotonic() - started
                record |= {"epoch": epoch, "tokens_per_s": round((self.tokens - before) / seconds, 1)}
                self.folder.log(record)
                index += 1
                if self.step % plan.eval_every == 0 or self.step == stop:
                    self._evaluate()
                    self._draw(last=self.step == stop)
                    started, before = time.monotonic(), self.tokens
        return self.best_figures

    def _steps(self, epoch: int) -> list[list[list[int]]]:
        """The sequences of every forward of every optimizer step."""
        plan = self.plan
        flat = epoch_batches(self.data, self.train_set, plan.batch_tokens, seed=plan.seed, epoch=epoch)
        return [flat[i : i + plan.accumulate] for i in range(0, len(flat), plan.accumulate)]

    def _train_step(self, groups: list[list[int]]) -> dict[str, Any]:
        plan, ranks, task = self.plan, self.ranks, self.task
        batches = [
            (index, make_batch(self.data, groups[index], passes=task.passes, learned=task.learned))
            for index in ranks.share(range(len(groups)))
        ]
        rows = max(int(ranks.total(sum(len(batch.at) for _, batch in batches))), 1)
        losses = [functools.partial(self._loss, batch=batch, index=index, rows=rows) for index, batch in batches]
        total = ranks.total(self.parallel.backward(losses))
        norm = self.parallel.clip(plan.clip)
        lr = plan.lr * learning_rate(self.step, plan.warmup, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if not math.isfinite(total) or not math.isfinite(norm):
            raise ConfigError(f"step {self.step}: the loss is {total}, the gradient {norm}: lower --lr")
        self.optimizer.step()
        self.step += 1
        self.tokens += rows
        return {"step": self.step, "loss": round(total, 5), "lr": lr, "gradient": round(norm, 4)}

    def _loss(self, model: Any, *, batch: Batch, index: int, rows: int) -> torch.Tensor:
        """Of forward `index` of this step, which has so many rows in all. Chance does not depend on the rank."""
        place = (self.plan.seed * 1_000_003 + self.step) * 1_000_003 + index
        return self.task.loss(model, batch, torch.Generator().manual_seed(place % 2**63)) / rows

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Held-out figures into the log; a checkpoint; the model's folder when it is the best so far."""
        task, passes = self.task, max(self.task.passes, self.plan.eval_steps)
        figures = Figures.empty(passes)
        groups = epoch_batches(self.data, self.held_out, self.plan.batch_tokens, seed=0, epoch=0)
        with self.parallel.whole():
            for group in self.ranks.share(groups):
                batch = make_batch(self.data, group, passes=passes, learned=self.answers)
                add_figures(figures, task.outputs(self.parallel.model, batch, passes), batch, task.vocabulary)
        self.ranks.sum(figures.tensors())
        report = figures.report()
        # The expected number of drafts that greedy verification keeps of as many as there are passes.
        kept = sum(math.prod(report["top1"][: index + 1]) for index in range(passes))
        record = {"step": self.step, "held_out": report, "kept": round(kept, 4)}
        self.folder.log(record)
        self.folder.say(
            f"step {self.step}: held-out top-1 {report['top1']}, overlap {report['overlap']}, kept {kept:.3f}"
        )
        tensors = checkpoint_tensors(self.parallel, self.optimizer)
        if kept > self.best:
            self.best, self.best_figures = kept, record
            self._export({name: tensors[f"weight.{name}"] for name in self.parallel.parameters})
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "best": self.best,
            "best_figures": self.best_figures,
            "identity": self.identity,
        }
        if self.ranks.first:
            save_checkpoint(self.folder.checkpoint, tensors, state)

    def _draw(self, *, last: bool) -> None:
        """The log's curves; while the run goes on at most once a minute."""
        if self.ranks.first and (last or time.monotonic() - self.drawn_s > _DRAW_EVERY_S):
            draw(self.plan.output)
            self.drawn_s = time.monotonic()

    def _export(self, weights: Mapping[str, torch.Tensor]) -> None:
        provenance = {
            "settings": {name: without_place(value) for name, value in self.identity.items()},
            "ranks": self.ranks.size,
            "shards": dataclasses.asdict(self.data.origin),
            **self.task.provenance(),
            "figures": self.best_figures,
        }
        self.folder.replace(lambda path: self.task.write(path, weights), provenance)


def _predicts(data: Collected, chosen: list[int], answers: torch.Tensor) -> bool:
    """Whether any token of the chosen sequences is predicted: none follows a sequence's first one, or its last."""
    spans = (slice(int(data.starts[s]) + 1, int(data.starts[s] + data.lens[s]) - 1) for s in chosen)
    return any(bool(answers[span].any()) for span in spans)


def learning_rate(step: int, warmup: int, total: int) -> float:
    """A share of the highest: linear warm-up, then a cosine down to a hundredth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
