"""Trains an MTP head on what `collect` wrote.

    shards -> batches -> passes (unrolled) -> divergence from the target -> AdamW -> held-out figures -> head folder

The output folder holds `log.jsonl`, `checkpoint.safetensors` (a run that finds one goes on from it) and `head/`, the
best head so far by held-out top-1: it can be taken at any time.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import torch

from specd.errors import ConfigError
from specd.models.heads import HeadConfig, write_head
from specd.train.batches import draft_vocabulary, epoch_batches, follows, make_batch, sequences
from specd.train.checkpoint import load_checkpoint, read_state, save_checkpoint
from specd.train.head import HeadInputs, TrainableHead, balance, initial_weights
from specd.train.run import Figures, LossSettings, Vocabulary, add_figures, batch_loss, run_passes
from specd.train.shards import Collected, read_shards
from specd.train.target import FrozenTarget, read_frozen, weights_fingerprint

OPTIONAL_PARTS = ("embedding_norm", "hidden_norm", "input_norm", "output_norm")


@dataclasses.dataclass(frozen=True, slots=True)
class MtpSettings:
    """What is trained and how. The first three say where; everything else makes the run what it is."""

    model: Path
    shards: Path
    output: Path
    draft_vocab: int = 0  # tokens; 0: all of the target's
    steps: int = 1  # unrolled passes
    step_decay: float = 0.8
    loss: str = "kl"
    feature_weight: float = 0.0
    noise: float = 0.0  # on the features: standard deviation in units of their root mean square
    epochs: int = 6
    batch_tokens: int = 2048  # padded tokens of a forward
    accumulate: int = 1  # forwards of an optimizer step
    lr: float = 5e-4
    warmup: int = 50  # optimizer steps
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    concat: str = "embedding_first"
    feedback: str = "post_norm"
    without: tuple[str, ...] = ()  # of OPTIONAL_PARTS
    eval_every: int = 100  # optimizer steps
    eval_tokens: int = 16384  # held-out tokens that are looked at
    eval_steps: int = 3  # passes that are looked at
    stop_after: int = 0  # optimizer steps, then a checkpoint; 0: train to the end

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        places = ("model", "shards", "output", "eval_every", "eval_tokens", "eval_steps", "stop_after")
        fields = dataclasses.asdict(self) | {"without": list(self.without)}
        return {name: value for name, value in fields.items() if name not in places}


def train(settings: MtpSettings) -> dict[str, Any]:
    """Trains to the end, or goes on where the output folder's checkpoint stands. Gives the best held-out figures."""
    data = read_shards(settings.shards)
    target = read_frozen(settings.model)
    _check(settings, data, target)
    run = _Run(settings, data, target)
    run.resume()
    return run.train()


def head_config(settings: MtpSettings, target: FrozenTarget, features: str) -> HeadConfig:
    """A head of the target's own sizes. Raises ConfigError for choices that do not exist."""
    model = target.config
    data = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "rope": dataclasses.asdict(model.rope),
        "max_position": model.max_position,
        "vocab_size": target.vocab_size,
        "features": features,
        "concat": settings.concat,
        "feedback": settings.feedback,
        "attention_bias": model.qkv_bias,
        "draft_vocab_size": settings.draft_vocab or None,
    }
    return HeadConfig.from_json(data | dict.fromkeys(settings.without, False), settings.output)


def render(record: dict[str, Any]) -> str:
    """The best held-out figures for people."""
    report = record["held_out"]
    lines = [f"best at step {record['step']}, {record['kept']} drafts kept of {len(report['top1'])} by greedy decoding"]
    lines += [f"{name:8}" + "".join(f"{value:9.4f}" for value in report[name]) for name in ("top1", "overlap", "loss")]
    return "\n".join(lines)


class _Run:
    """One training run: everything that a step reads and changes."""

    def __init__(self, settings: MtpSettings, data: Collected, target: FrozenTarget) -> None:
        self.settings, self.data, self.target = settings, data, target
        token_ids, self.coverage = None, 1.0
        if settings.draft_vocab:
            token_ids, self.coverage = draft_vocabulary(data, settings.draft_vocab, target.vocab_size)
        self.vocabulary = Vocabulary.of(target.lm_head, token_ids)
        config = head_config(settings, target, data.origin.features)
        self.loss = LossSettings(settings.loss, settings.step_decay, settings.feature_weight)
        self.train_set, held_out = sequences(data, held_out=False), sequences(data, held_out=True)
        self.held_out = _first(held_out, data, settings.eval_tokens)
        self.answers = follows(data)
        self.learned = self.answers & (self.vocabulary.places[data.best] >= 0)
        self.head = TrainableHead(config, self._initial_weights(config), target.embedding)
        self.optimizer = torch.optim.AdamW(
            list(self.head.weights.values()), lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self.step, self.tokens, self.best = 0, 0, -1.0
        self.best_figures: dict[str, Any] = {}
        self.steps_per_epoch = len(self._steps(0))
        self.total = settings.epochs * self.steps_per_epoch

    def resume(self) -> None:
        """From the output folder's checkpoint, if there is one. Raises ConfigError when it is of another run."""
        self.settings.output.mkdir(parents=True, exist_ok=True)
        path = self._path("checkpoint.safetensors")
        if not path.exists():
            self._path("log.jsonl").unlink(missing_ok=True)
            return
        state = read_state(path)
        for name, value in self._identity().items():
            if state["identity"].get(name) != value:
                raise ConfigError(
                    f"{path}: was made with {name} {state['identity'].get(name)!r}, not {value!r}; "
                    "give the same settings, or another --output"
                )
        load_checkpoint(path, self.head.weights, self.optimizer, state["step"])
        self.step, self.tokens, self.best = state["step"], state["tokens"], state["best"]
        self.best_figures = state["best_figures"]
        lines = self._path("log.jsonl").read_bytes().splitlines() if self._path("log.jsonl").exists() else []
        kept = [line for line in lines if orjson.loads(line)["step"] <= self.step]
        self._path("log.jsonl").write_bytes(b"".join(line + b"\n" for line in kept))
        self._say(f"going on from step {self.step} of {self.total}")

    def train(self) -> dict[str, Any]:
        settings = self.settings
        self._say(
            f"{self.total} steps; draft vocabulary of {len(self.vocabulary.rows)} tokens covers {self.coverage:.4f}"
        )
        stop = min(self.total, settings.stop_after or self.total)
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
                self._log(record)
                index += 1
                if self.step % settings.eval_every == 0 or self.step == stop:
                    self._evaluate()
                    started, before = time.monotonic(), self.tokens
        return self.best_figures

    def _initial_weights(self, config: HeadConfig) -> dict[str, torch.Tensor]:
        batch = make_batch(self.data, self.train_set[:1], passes=1, learned=self.learned)
        sample = HeadInputs(batch.tokens[:, 1:], batch.features, self.target.embedding)
        return balance(config, initial_weights(config, self.target, self.settings.seed), sample)

    def _steps(self, epoch: int) -> list[list[list[int]]]:
        """The sequences of every forward of every optimizer step."""
        s = self.settings
        flat = epoch_batches(self.data, self.train_set, s.batch_tokens, seed=s.seed, epoch=epoch)
        return [flat[i : i + s.accumulate] for i in range(0, len(flat), s.accumulate)]

    def _train_step(self, groups: list[list[int]]) -> dict[str, Any]:
        settings = self.settings
        self.optimizer.zero_grad(set_to_none=True)
        batches = [make_batch(self.data, g, passes=settings.steps, learned=self.learned) for g in groups]
        rows = max(sum(len(batch.at) for batch in batches), 1)
        total = 0.0
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + self.step)
        for batch in batches:
            noise = _noise(batch.features, settings.noise, generator)
            out = run_passes(self.head, batch, passes=settings.steps, noise=noise)
            loss = batch_loss(out, batch, self.vocabulary, self.loss) / rows
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.head.weights.values(), settings.clip)
        lr = settings.lr * _schedule(self.step, settings.warmup, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if not math.isfinite(total) or not bool(norm.isfinite()):
            raise ConfigError(f"step {self.step}: the loss is {total}, the gradient {float(norm)}: lower --lr")
        self.optimizer.step()
        self.step += 1
        self.tokens += rows
        return {"step": self.step, "loss": round(total, 5), "lr": lr, "gradient": round(float(norm), 4)}

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Held-out figures into the log; a checkpoint; the head when it is the best so far."""
        passes = max(self.settings.steps, self.settings.eval_steps)
        figures = Figures.empty(passes)
        for group in epoch_batches(self.data, self.held_out, self.settings.batch_tokens, seed=0, epoch=0):
            batch = make_batch(self.data, group, passes=passes, learned=self.answers)
            add_figures(figures, run_passes(self.head, batch, passes=passes), batch, self.vocabulary)
        report = figures.report()
        # The expected number of drafts that greedy verification keeps of as many as there are passes.
        kept = sum(math.prod(report["top1"][: index + 1]) for index in range(passes))
        record = {"step": self.step, "held_out": report, "kept": round(kept, 4)}
        self._log(record)
        self._say(f"step {self.step}: held-out top-1 {report['top1']}, overlap {report['overlap']}, kept {kept:.3f}")
        if kept > self.best:
            self.best, self.best_figures = kept, record
            self._export(record)
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "best": self.best,
            "best_figures": self.best_figures,
            "identity": self._identity(),
        }
        save_checkpoint(self._path("checkpoint.safetensors"), self.head.weights, self.optimizer, state)

    def _export(self, record: dict[str, Any]) -> None:
        """Replaces head/ by what is trained now."""
        target, partial = self.target, self._path("head.partial")
        shutil.rmtree(partial, ignore_errors=True)
        names = {
            "name": target.name,
            "hidden_size": target.config.hidden_size,
            "vocab_size": target.vocab_size,
            "num_layers": target.config.num_layers,
        }
        write_head(partial, self.head.config, self.head.weights, token_ids=self.vocabulary.token_ids, target=names)
        provenance = {
            "command": sys.argv,
            "settings": self._identity(),
            "shards": dataclasses.asdict(self.data.origin),
            "versions": {name: version(name) for name in ("specd", "torch")},
            "draft_vocabulary_coverage": round(self.coverage, 5),
            "figures": record,
        }
        (partial / "provenance.json").write_bytes(orjson.dumps(provenance, option=orjson.OPT_INDENT_2) + b"\n")
        final, old = self._path("head"), self._path("head.old")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)

    def _identity(self) -> dict[str, Any]:
        return self.settings.identity() | {"data": self.data.fingerprint}

    def _path(self, name: str) -> Path:
        return self.settings.output / name

    def _log(self, record: dict[str, Any]) -> None:
        with self._path("log.jsonl").open("ab") as file:
            file.write(orjson.dumps(record) + b"\n")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _check(settings: MtpSettings, data: Collected, target: FrozenTarget) -> None:
    if data.origin.fingerprint != weights_fingerprint(settings.model):
        raise ConfigError(f"{settings.shards}: were collected from {data.origin.target}, not from {settings.model}")
    if settings.draft_vocab > target.vocab_size:
        raise ConfigError(f"--draft-vocab {settings.draft_vocab}: {target.name} has {target.vocab_size} tokens")
    for held_out in (False, True):
        if not sequences(data, held_out=held_out):
            raise ConfigError(f"{settings.shards}: no sequence is {'held out' if held_out else 'to train on'}")


def _first(chosen: list[int], data: Collected, num_tokens: int) -> list[int]:
    """As many as num_tokens allow, evenly spread."""
    sizes = data.lens[chosen]
    share = min(1.0, num_tokens / float(sizes.sum()))
    count = max(1, round(share * len(chosen)))
    return [chosen[i * len(chosen) // count] for i in range(count)]


def _noise(features: torch.Tensor, strength: float, generator: torch.Generator) -> torch.Tensor | None:
    if not strength:
        return None
    size = features.square().mean(-1, keepdim=True).sqrt()
    return strength * size * torch.randn(features.shape, generator=generator)


def _schedule(step: int, warmup: int, total: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
