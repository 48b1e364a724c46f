"""Nothing on a stream waits for the device: no copy to the host, no shape that depends on values.

Two nets: a rule over the source of everything that is launched, with the few host places named; and the stages
themselves under FakeTensorMode, away from the CPU, which raises where a real GPU would have to be waited for, and where
tensors of two devices meet.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)

import specd
from specd.attention.torch_attention import TorchAttention
from specd.drafters.lm import LMDrafter
from specd.frames import fresh_upload
from specd.kv import PagedFeatures, PagedKV
from specd.models.llama import Llama
from specd.pipeline.accept import accept_rows
from specd.pipeline.draft import DraftRule, grow_chain
from specd.pipeline.refill import refill_exact, refill_padded
from specd.pipeline.verify import VerifyBatch, forward, upload
from specd.request import SamplingParams
from specd.sampling.chain import AcceptanceSettings
from specd.step import AcceptanceReport, DraftSource, Refill, RowSampling, StepPlan, indptr
from specd.tensors import Acceptance, DraftState, DraftTokens, TargetOutput
from tests.fakes import MatrixHead
from tests.tiny import LLAMA3_ROPE, tiny_config, tiny_weights

ROOT = Path(specd.__file__).parent

# ---------------------------------------------------------------- the rule over the source

FILES = (
    "pipeline/draft.py",
    "pipeline/verify.py",
    "pipeline/accept.py",
    "pipeline/refill.py",
    "drafters/*.py",
    "models/llama.py",
    "models/layers.py",
    "sampling/*.py",
    "attention/*.py",
    "kv.py",
    "tensors.py",
)
FORBIDDEN_METHODS = {"item", "cpu", "tolist", "nonzero", "numpy", "synchronize", "masked_select", "unique"}
FORBIDDEN_TORCH = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "bincount"}

# Functions that work on the host, on numpy and plan arrays, or are the one copy to the host of a step.
HOST = {
    "pipeline/accept.py": {"_i32", "_f32"},  # to_host: the step's report
    "pipeline/draft.py": {"DraftStage.launch"},  # reads the plan, before anything is launched
    "pipeline/verify.py": {"upload"},  # arithmetic over the plan's arrays, then one upload
    "pipeline/refill.py": {"missing_tokens"},  # reads the report, on the host
}


def violations(source: str) -> Iterator[tuple[str, int, str]]:
    """(function, line, what) of everything in `source` that a stream would wait for."""
    tree = ast.parse(source)
    for name, function in functions(tree):
        masks = mask_names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                of_torch = isinstance(owner, ast.Name) and owner.id in ("torch", "F")
                if node.func.attr in (FORBIDDEN_TORCH if of_torch else FORBIDDEN_METHODS):
                    yield name, node.lineno, f".{node.func.attr}()"
                if node.func.attr == "where" and of_torch and len(node.args) == 1:
                    yield name, node.lineno, "where() of one argument"
            if isinstance(node, ast.Subscript) and is_mask(node.slice, masks):
                yield name, node.lineno, "indexing by a mask"


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"{node.name}.{part.name}", part


def mask_names(function: ast.AST) -> set[str]:
    """Local names that hold the result of a comparison."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and is_mask(node.value, set()):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def is_mask(node: ast.AST, masks: set[str]) -> bool:
    """Whether an expression is a comparison, or is made of comparisons."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        return is_mask(node.left, masks) or is_mask(node.right, masks)
    return isinstance(node, ast.Name) and node.id in masks


def sources() -> list[Path]:
    return sorted({path for pattern in FILES for path in ROOT.glob(pattern)})


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_wait_in_the_source(path: Path) -> None:
    allowed = HOST.get(str(path.relative_to(ROOT)), set())
    found = [entry for entry in violations(path.read_text()) if entry[0] not in allowed]
    assert not found


def test_every_host_function_still_needs_its_permission() -> None:
    for name, allowed in HOST.items():
        assert {entry[0] for entry in violations((ROOT / name).read_text())} >= allowed, name


@pytest.mark.parametrize(
    "line",
    [
        "x.item()",
        "x.sum().cpu()",
        "x.tolist()",
        "torch.nonzero(x)",
        "x.nonzero()",
        "torch.cuda.synchronize()",
        "x.numpy()",
        "x[x > 0]",
        "x[~y]",
        "x[(x > 0) & y]",
        "x.masked_select(y)",
        "torch.where(x)",
        "x.unique()",
    ],
)
def test_the_rule_finds(line: str) -> None:
    assert list(violations(f"def f(x, y):\n    return {line}\n"))
    assert list(violations(f"class C:\n    def f(self, x, y):\n        z = {line}\n"))


def test_the_rule_follows_a_name_and_lets_the_rest_be() -> None:
    assert list(violations("def f(x):\n    kept = x > 0\n    return x[kept]\n"))
    fine = (
        "def f(x, i, y):\n    kept = x > 0\n    return torch.where(kept, x, y)[i], x.masked_fill(kept, 0.0), x[:, 1:]\n"
    )
    assert not list(violations(fine))


# ---------------------------------------------------------------- the stages on a GPU that is not there

# Every rule of FakeTensorMode is the same on "meta"; indexing a fake CUDA tensor needs a build and a driver for CUDA.
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "meta")
CONFIG = tiny_config(hidden_size=32, intermediate_size=48, num_layers=3, head_dim=8, rope=LLAMA3_ROPE)
NUM_PAGES, PAGE = 16, 4


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 50, "seed": 3} | changes))


ROWS: list[SamplingParams | None] = [
    params(temperature=0.0),
    params(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, logprobs=3),
    params(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=((3, 1.0),)),
    params(bad_words_ids=((1,), (2, 3)), min_tokens=9, stop_token_ids=(5,), allowed_token_ids=(1, 2, 3, 4)),
    None,  # a prompt chunk
]


def row_sampling(parameters: SamplingParams | None) -> RowSampling | None:
    if parameters is None:
        return None
    some = np.asarray([1, 2], np.int32) if parameters.penalised else None
    return RowSampling(
        params=parameters,
        eos_ids=(0,),
        noise_key=(3, 0, 0),
        position=6,
        num_output=2,
        output_ids=some,
        output_counts=some,
        prompt_ids=some,
        tail=(4, 5),
    )


def make_plan(*, extra: int, refill: int, num_drafts: tuple[int, ...] = (2, 2, 1, 2)) -> StepPlan:
    """Four decode rows at position 5 and a chunk of 5 tokens; with drafts of the drafter for each decode row."""
    drafts = np.asarray([*num_drafts, 0], np.int32)
    known = np.asarray([1, 1, 1, 1, 5], np.int32)
    computed = np.asarray([5, 5, 5, 5, 0], np.int32)
    size, missing = len(known), np.asarray([0, 0, 0, 0, 5], np.int32)
    return StepPlan(
        step=1,
        page_size=PAGE,
        slots=np.arange(size, dtype=np.int32),
        query_lens=known + drafts,
        kv_lens=computed + known + drafts,
        num_drafts=drafts,
        sources=np.where(drafts > 0, DraftSource.DRAFTER, 0).astype(np.int32),
        host_drafts=np.full((size, int(drafts.max())), -1, np.int32),
        page_indptr=indptr(np.full(size, 3, np.int32)),
        page_indices=np.arange(3 * size, dtype=np.int32),
        tokens=np.ones(int(known.sum()), np.int32),
        next_prompt_tokens=np.asarray([-1, -1, -1, -1, 7], np.int32),
        emits=np.asarray([1, 1, 1, 1, 0], np.int32),
        drafter_lens=computed + np.asarray([extra] * 4 + [0], np.int32),
        refills=np.asarray([refill] * 4 + [Refill.KNOWN], np.int32),
        refill_indptr=indptr(missing),
        refill_tokens=np.ones(int(missing.sum()), np.int32),
        sampling=tuple(row_sampling(parameters) for parameters in ROWS),
    )


@dataclasses.dataclass
class Rig:
    """A target, a draft model and a head on one device."""

    device: torch.device
    target: Llama
    kv: PagedKV
    features: PagedFeatures
    drafter: LMDrafter
    head: MatrixHead

    def carry(self, width: int | None) -> DraftState:
        logits = torch.zeros((8, CONFIG.vocab_size), device=self.device)
        return DraftState.of(logits, None if width is None else torch.zeros((8, width), device=self.device))

    def verify(self, plan: StepPlan, drafts: DraftTokens) -> tuple[VerifyBatch, TargetOutput]:
        batch = upload(plan, fresh_upload(self.device), CONFIG.vocab_size)
        return batch, forward(self.target, self.kv, self.features, "last", batch, drafts)


def make_rig(device: torch.device) -> Rig:
    target = Llama(CONFIG, tiny_weights(CONFIG), attention=TorchAttention(), dtype=torch.float32, device=device)
    shape = target.shape
    kv = PagedKV(
        num_layers=shape.num_layers,
        num_pages=NUM_PAGES,
        page_size=PAGE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32,
        device=device,
    )
    features = PagedFeatures(
        num_pages=NUM_PAGES, page_size=PAGE, width=shape.hidden_size, dtype=torch.bfloat16, device=device
    )
    drafter = LMDrafter(
        target.truncated(1), name="layers:1", vocab_size=CONFIG.vocab_size, max_depth=8, max_context=None
    )
    drafter.allocate(num_pages=NUM_PAGES, page_size=PAGE)
    return Rig(device, target, kv, features, drafter, MatrixHead(CONFIG.vocab_size, CONFIG.hidden_size, device))


def report_of(plan: StepPlan) -> AcceptanceReport:
    """One draft kept in every decode row."""
    kept = np.where(plan.emits > 0, np.minimum(plan.num_drafts, 1), 0).astype(np.int32)
    tokens = np.full((plan.num_rows, plan.max_drafts + 1), -1, np.int32)
    for row in range(plan.num_rows):
        if plan.emits[row]:
            tokens[row, : kept[row] + 1] = 4
    return AcceptanceReport(
        tokens=tokens,
        num_accepted=kept,
        failed=np.zeros(plan.num_rows, np.int32),
        drafts=np.full((plan.num_rows, plan.max_drafts), 4, np.int32),
    )


def draft_stage(rig: Rig, rule: str, *, head: bool) -> DraftTokens:
    plan = make_plan(extra=0 if head else 1, refill=Refill.NEWEST)
    drafter, width = (rig.head, CONFIG.hidden_size) if head else (rig.drafter, None)
    return grow_chain(drafter, plan, [0, 1, 2, 3], DraftRule(rule), rig.carry(width), rig.device)


def accept_stage(rig: Rig, rule: str, *, head: bool = False) -> tuple[StepPlan, VerifyBatch, TargetOutput, Acceptance]:
    plan = make_plan(extra=0 if head else 1, refill=Refill.NEWEST)
    drafts = draft_stage(rig, rule, head=head)
    batch, output = rig.verify(plan, drafts)
    return plan, batch, output, accept_rows(rule, AcceptanceSettings(), plan, batch, drafts, output, None)


def exact_stage(rig: Rig, *, head: bool) -> DraftState:
    plan = make_plan(extra=0 if head else 1, refill=Refill.NEWEST)
    drafter, features, width = (rig.head, rig.features, CONFIG.hidden_size) if head else (rig.drafter, None, None)
    return refill_exact(drafter, features, plan, report_of(plan), rig.carry(width), DraftRule(), rig.device)


def padded_stage(rig: Rig) -> DraftState:
    plan, batch, output, accepted = accept_stage(rig, "exact", head=True)
    return refill_padded(rig.head, batch, output, accepted, plan, rig.carry(CONFIG.hidden_size), DraftRule())


def aux_features(rig: Rig) -> torch.Tensor:
    plan = make_plan(extra=1, refill=Refill.NEWEST)
    batch = upload(plan, fresh_upload(rig.device), CONFIG.vocab_size)
    _, read = rig.target.forward(batch.tokens, batch.info, rig.kv, features="aux")
    assert read is not None
    return read


STAGES: dict[str, Callable[[Rig], object]] = {
    "draft": lambda rig: draft_stage(rig, "exact", head=False),
    "draft of a head": lambda rig: draft_stage(rig, "exact", head=True),
    "draft, ratio": lambda rig: draft_stage(rig, "ratio", head=False),
    "accept": lambda rig: accept_stage(rig, "exact"),
    "accept, ratio": lambda rig: accept_stage(rig, "ratio"),
    "accept, typical": lambda rig: accept_stage(rig, "typical"),
    "accept, threshold": lambda rig: accept_stage(rig, "threshold"),
    "refill exact": lambda rig: exact_stage(rig, head=False),
    "refill exact of a head": lambda rig: exact_stage(rig, head=True),
    "refill padded": padded_stage,
    "features of three layers": aux_features,
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_stages_wait_for_nothing(stage: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        STAGES[stage](make_rig(DEVICE))


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_calls_compute_something_real(stage: str) -> None:
    """On the CPU, with values: the plans above are plans that the stages can run."""
    with torch.inference_mode():
        STAGES[stage](make_rig(torch.device("cpu")))


def test_shapes_of_the_outcome_are_those_of_the_plan() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        plan, _, output, accepted = accept_stage(make_rig(DEVICE), "exact")
    assert output.logits.device.type == accepted.tokens.device.type == DEVICE.type
    assert output.logits.shape == (int(plan.num_drafts.sum()) + 4, CONFIG.vocab_size)
    assert accepted.tokens.shape == (5, 3)
    assert accepted.top_ids is not None
    assert accepted.top_ids.shape == (5, 3, 3)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: int(x.max()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
    ],
)
def test_the_mode_raises_where_a_gpu_would_wait(wait: Callable[[torch.Tensor], object]) -> None:
    """Negative control, on a tensor that a stage has made."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        accepted = accept_stage(make_rig(DEVICE), "exact")[3]
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            wait(accepted.num_accepted)


def test_the_mode_raises_where_devices_meet() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        accepted = accept_stage(make_rig(DEVICE), "exact")[3]
        with pytest.raises(FakeTensorDeviceMismatchError):
            accepted.num_accepted + torch.ones(5, dtype=torch.int64)
