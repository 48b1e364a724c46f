"""From a Config to the parts of an engine: target, tokenizer, drafter, pages, stages. Blocking; runs in a thread."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import time
from pathlib import Path

import torch

from specd.attention.torch_attention import TorchAttention
from specd.config import Config
from specd.config_options import memory_bytes
from specd.corpora import Corpora
from specd.device import Device, cpu_device, usable_cores
from specd.drafters.base import Drafter
from specd.drafters.registry import (
    DraftChoice,
    borrowing_drafter,
    layers_drafter,
    lm_drafter,
    mtp_drafter,
    parse_draft,
    settle,
)
from specd.errors import ConfigError, DraftError
from specd.grammar import GrammarMatcher, Grammars
from specd.kv import PagedFeatures
from specd.models.base import Model, kv_slot_bytes, make_kv
from specd.models.borrowed import is_borrowing
from specd.models.fetch import read_template, resolve, split_revision
from specd.models.gguf import read_metadata
from specd.models.registry import KernelChoice, LoadedModel, load_target
from specd.pages import PagePool
from specd.pipeline.accept import AcceptStage
from specd.pipeline.counters import Counters
from specd.pipeline.draft import DraftRule, DraftStage
from specd.pipeline.draft_length import AdaptiveLength, DraftLength, FixedLength
from specd.pipeline.masks import MaskStage
from specd.pipeline.refill import RefillStage
from specd.pipeline.schedule import Limits, Scheduler
from specd.pipeline.verify import VerifyStage
from specd.proposers.base import Proposer
from specd.proposers.choose import proposers_of
from specd.request import Request
from specd.sampling.chain import AcceptanceSettings
from specd.status import EngineInfo
from specd.step import Topology
from specd.tensors import DraftState
from specd.text import Tokenizer
from specd.timeline import Timeline

_RAM_SHARE = 0.25  # of the machine's memory, at most, for a pool whose size nobody gave
_KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(slots=True)
class Parts:
    """Everything an engine is made of."""

    config: Config
    info: EngineInfo
    tokenizer: Tokenizer
    grammars: Grammars
    corpora: Corpora
    device: Device
    scheduler: Scheduler
    draft: DraftStage
    verify: VerifyStage
    masks: MaskStage
    accept: AcceptStage
    refill: RefillStage | None
    drafter: Drafter | None
    uses_ngram: bool

    def proposers(self, request: Request, grammar: GrammarMatcher | None) -> tuple[Proposer, ...]:
        return proposers_of(
            request,
            self.config.speculation,
            uses_ngram=self.uses_ngram,
            corpora=self.corpora,
            grammar=grammar,
        )

    def make_carry(self) -> DraftState:
        assert self.drafter is not None
        return self.drafter.make_carry(self.config.scheduler.max_running)


def assemble(config: Config, *, device: Device | None = None, grammars: bool = False) -> Parts:
    """Loads and builds everything. Raises ConfigError, FetchError, ModelError or DraftError.

    grammars: also what they need, which takes about a second and the GIL.
    """
    choice = parse_draft(config.speculation.draft)
    threads = config.model.threads or usable_cores()
    torch.set_num_threads(threads)
    device = device or cpu_device(layout=config.scheduler.streams, threads=threads, timeline=Timeline())
    try:
        parts = _assemble(config, choice, device)
        if grammars:
            parts.grammars.load()
        return parts
    except BaseException:
        device.close()
        raise


def _assemble(config: Config, choice: DraftChoice, device: Device) -> Parts:
    target, tokenizer = _load(config.model.path, config.model.revision, config, device)
    if config.model.chat_template:
        tokenizer.chat_template = read_template(Path(config.model.chat_template))
    choice = settle(choice, target, Path(config.model.path).name)
    drafter = _drafter(choice, config, target, tokenizer, device)
    return build(config, choice, target=target, tokenizer=tokenizer, drafter=drafter, device=device)


def build(
    config: Config,
    choice: DraftChoice,
    *,
    target: LoadedModel,
    tokenizer: Tokenizer,
    drafter: Drafter | None,
    device: Device,
) -> Parts:
    """Everything around models that are loaded already. Raises ConfigError."""
    max_len = _max_len(config, target)
    max_draft = _max_draft(config, choice)
    pool = _pool(config, target, drafter, max_len)
    kv = make_kv(target.model, num_pages=pool.num_pages, page_size=pool.page_size, dtype=kv_dtype(config, target.model))
    features = None
    if drafter is not None:
        if drafter.traits.topology is not Topology.CHAIN:
            raise DraftError(f"drafter {drafter.traits.name} drafts trees; this engine schedules chains")
        drafter.allocate(num_pages=pool.num_pages, page_size=pool.page_size)
        features = _features(target, drafter, pool)
    settings = AcceptanceSettings(
        threshold=config.speculation.threshold,
        threshold_score=config.speculation.threshold_score,
        typical_threshold=config.speculation.typical_threshold,
        typical_alpha=config.speculation.typical_alpha,
    )
    rule = DraftRule(config.speculation.acceptance, argmax=config.speculation.draft_sampling == "greedy")
    traits = None if drafter is None else drafter.traits
    scheduler = Scheduler(
        pool=pool,
        limits=Limits(
            max_running=config.scheduler.max_running,
            max_tokens=config.scheduler.max_tokens,
            mixed=config.scheduler.mixed,
            pad_proposals=config.speculation.draft_len != "adaptive",
            priority_ageing_s=config.scheduler.priority_ageing_s,
        ),
        traits=traits,
        length=_length(config),
        counters=Counters(max_draft),
    )
    info = _info(config, choice, target, drafter, tokenizer, pool, max_len, max_draft)
    return Parts(
        config=config,
        info=info,
        tokenizer=tokenizer,
        grammars=Grammars(tokenizer, vocab_size=info.vocab_size, eos_ids=info.eos_ids),
        corpora=Corpora(tokenizer, vocab_size=info.vocab_size, max_tokens=_corpora_tokens(config, max_draft)),
        device=device,
        scheduler=scheduler,
        draft=DraftStage(drafter, device, rule=rule),
        verify=VerifyStage(
            target.model, kv, device, features=features, wanted=None if traits is None else traits.features
        ),
        masks=MaskStage(device, vocab_size=info.vocab_size),
        accept=AcceptStage(device, rule=config.speculation.acceptance, settings=settings),
        refill=None if drafter is None else RefillStage(drafter, device, features=features, rule=rule),
        drafter=drafter,
        uses_ngram=choice.uses_ngram,
    )


def _load(name: str, revision: str, config: Config, device: Device) -> tuple[LoadedModel, Tokenizer]:
    path = resolve(name, revision=revision or None, offline=config.model.offline)
    loaded = load_target(
        path,
        dtype=config.model.dtype,
        device=device.torch_device,
        attention=TorchAttention(),
        kernels=KernelChoice(config.model.kernels, config.model.activations, config.model.quantize),
    )
    return loaded, Tokenizer.load(path, read_metadata=read_metadata)


def _drafter(
    choice: DraftChoice, config: Config, target: LoadedModel, tokenizer: Tokenizer, device: Device
) -> Drafter | None:
    if choice.kind == "layers":
        return layers_drafter(target, int(choice.argument))
    if choice.kind == "mtp":
        return mtp_drafter(target, choice.folder)
    if choice.kind == "lm" and is_borrowing(choice.folder):
        return borrowing_drafter(target, choice.folder)
    if choice.kind == "lm":
        name, revision = split_revision(choice.argument)
        draft, draft_tokenizer = _load(name, revision, config, device)
        return lm_drafter(target, tokenizer, draft, draft_tokenizer, name=choice.name)
    return None


def _max_len(config: Config, target: LoadedModel) -> int:
    longest = target.model.shape.max_position
    if config.model.max_len > longest:
        raise ConfigError(
            f"model.max_len is {config.model.max_len}; {target.name} was made for at most {longest} tokens"
        )
    return config.model.max_len or longest


def _max_draft(config: Config, choice: DraftChoice) -> int:
    if choice.kind == "none":
        return 0
    length = config.speculation.draft_len
    return config.speculation.max_draft if isinstance(length, str) else length


def _corpora_tokens(config: Config, max_draft: int) -> int:
    """None without drafts: nothing would read them."""
    return config.speculation.corpora_tokens if max_draft else 0


def _length(config: Config) -> DraftLength:
    length = config.speculation.draft_len
    return AdaptiveLength() if isinstance(length, str) else FixedLength(length)


def kv_dtype(config: Config, target: Model) -> torch.dtype:
    """What `kv.dtype` says."""
    return target.dtype if config.kv.dtype == "auto" else _KV_DTYPES[config.kv.dtype]


def page_bytes(target: Model, drafter: Drafter | None, page_size: int, dtype: torch.dtype) -> int:
    """Memory of one page: the target's KV, which is of `dtype`, and the drafter's KV and the features it reads."""
    slot = kv_slot_bytes(target, dtype)
    if drafter is None:
        return slot * page_size
    features = _feature_width(target, drafter) * target.dtype.itemsize
    return (slot + features) * page_size + drafter.kv_bytes_per_page(page_size)


def _feature_width(target: Model, drafter: Drafter) -> int:
    """Values a token that the target leaves for a head to read."""
    return target.shape.hidden_size * {None: 0, "last": 1, "pre": 1, "aux": 3}[drafter.traits.features]


def _ram_bytes() -> int:
    """Memory of the machine, or of the control group this process lives in when that is less."""
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:  # no cgroup v2, or none of our own
        return ram
    return min(ram, int(limit)) if limit.isdigit() else ram


def _pool(config: Config, target: LoadedModel, drafter: Drafter | None, max_len: int) -> PagePool:
    """Sized by `kv.memory`; refused when one sequence of max_len would not fit, with both numbers."""
    size = config.kv.page_size
    extra = 0 if drafter is None else drafter.traits.extra_slots
    each = -(-(max_len + extra) // size)
    cost = page_bytes(target.model, drafter, size, kv_dtype(config, target.model))
    ram = _ram_bytes()
    memory = memory_bytes(config.kv.memory, ram_bytes=ram)
    if memory is None:
        memory = min(config.scheduler.max_running * each * cost, int(ram * _RAM_SHARE))
    num_pages = memory // cost
    if num_pages < each:
        raise ConfigError(
            f"kv.memory of {memory} bytes holds {num_pages} pages of {size} tokens; one sequence of max_len {max_len} "
            f"needs {each} pages ({each * cost} bytes): raise kv.memory or lower model.max_len"
        )
    return PagePool(num_pages=num_pages, page_size=size, prefix_cache=config.kv.prefix_cache)


def _features(target: LoadedModel, drafter: Drafter, pool: PagePool) -> PagedFeatures | None:
    if drafter.traits.features is None:
        return None
    return PagedFeatures(
        num_pages=pool.num_pages,
        page_size=pool.page_size,
        width=_feature_width(target.model, drafter),
        dtype=target.model.dtype,
        device=target.model.device,
    )


def _eos_ids(target: LoadedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    """A folder's generation_config.json has the last word; a GGUF names one, its vocabulary the ends of turns."""
    if target.path.is_dir():
        return target.eos_ids or tokenizer.eos_ids
    return tuple(dict.fromkeys((*target.eos_ids, *tokenizer.eos_ids)))


def _info(
    config: Config,
    choice: DraftChoice,
    target: LoadedModel,
    drafter: Drafter | None,
    tokenizer: Tokenizer,
    pool: PagePool,
    max_len: int,
    max_draft: int,
) -> EngineInfo:
    dtype = str(target.model.dtype).removeprefix("torch.")
    cached = kv_dtype(config, target.model)
    version = importlib.metadata.version("specd")
    identity = "|".join(
        (
            target.name,
            str(target.weight_bytes),
            dtype,
            str(cached),
            target.kernels,
            choice.name,
            config.model.revision,
            version,
        )
    )
    return EngineInfo(
        model=config.model.path,
        served_names=config.server.served_names or (config.model.path,),
        weight_bytes=target.weight_bytes,
        dtype=dtype,
        max_len=max_len,
        vocab_size=target.model.shape.vocab_size,
        eos_ids=_eos_ids(target, tokenizer),
        drafter=choice.name,
        max_draft=max_draft,
        acceptance=config.speculation.acceptance,
        kv_tokens=pool.num_pages * pool.page_size,
        page_size=pool.page_size,
        max_running=config.scheduler.max_running,
        fingerprint="fp_" + hashlib.sha256(identity.encode()).hexdigest()[:12],
        generation_defaults=target.generation_defaults,
        created=int(time.time()),
        kernels=target.kernels,
        kv_bytes=pool.num_pages * page_bytes(target.model, drafter, pool.page_size, cached),
    )
