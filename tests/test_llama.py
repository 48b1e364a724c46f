"""The Llama forward against transformers' own, in fp32; chunking, padding, sharing and features."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specd.attention.torch_attention import TorchAttention
from specd.errors import ModelError
from specd.models.config import LlamaConfig, RopeConfig, config_from_hf
from specd.models.gguf import GgufFile
from specd.models.llama import Llama
from specd.models.registry import generation_defaults, load_target
from specd.models.weights import SafetensorsFolder
from tests.tiny import (
    CPU,
    LLAMA3_ROPE,
    ReferenceAttention,
    greedy,
    make_batch,
    make_kv,
    padded,
    tiny_config,
    tiny_llama,
    tiny_weights,
    write_hf_folder,
)

TOLERANCE = 1e-4
VARIANTS = {
    "gqa untied": tiny_config(),
    "mha tied": tiny_config(num_kv_heads=4, tied=True),
    "llama3 rope": tiny_config(rope=LLAMA3_ROPE),
    "linear rope": tiny_config(rope=RopeConfig(theta=5000.0, kind="linear", factor=4.0)),
    "biases": tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True),
    "wide heads": tiny_config(head_dim=24, num_layers=2),
}


def tokens_of(length: int, *, seed: int = 7, vocab: int = 97) -> torch.Tensor:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def run_chunks(model: Llama, tokens: torch.Tensor, chunks: list[int], *, page_size: int = 4) -> torch.Tensor:
    """Logits of every token, fed in chunks, on pages in no particular order."""
    num_pages = -(-len(tokens) // page_size)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
    kv = make_kv(model, num_pages=num_pages, page_size=page_size)
    parts, done = [], 0
    with torch.inference_mode():
        for length in chunks:
            batch = make_batch([(length, done + length, pages)], page_size=page_size)
            hidden, features = model.forward(tokens[done : done + length], batch, kv)
            assert features is None
            parts.append(model.logits(hidden))
            done += length
    return torch.cat(parts)


def reference_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens[None]).logits[0]
    return logits


def load(folder: Path, dtype: str = "auto") -> Llama:
    return load_target(folder, dtype=dtype, device=CPU, attention=TorchAttention()).model


@pytest.mark.parametrize("old_keys", [False, True], ids=["new keys", "old keys"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, old_keys: bool, tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, config=VARIANTS[variant], old_keys=old_keys)
    tokens = tokens_of(24)
    expected = reference_logits(folder, tokens)
    assert expected.std() > 0.3, "flat logits would prove nothing"
    model = load(folder)
    for chunks in ([24], [11, 1, 2, 10], [1] * 24):
        torch.testing.assert_close(run_chunks(model, tokens, chunks), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_folders_saved_by_transformers_load(family: str, tmp_path: Path) -> None:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    configs = {
        "llama": lambda: transformers.LlamaConfig(**common, tie_word_embeddings=True),
        "mistral": lambda: transformers.MistralConfig(**common, sliding_window=None),
        "qwen2": lambda: transformers.Qwen2Config(**common),
    }
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(configs[family]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(24)
    expected = reference_logits(tmp_path, tokens)
    torch.testing.assert_close(run_chunks(load(tmp_path), tokens, [24]), expected, atol=TOLERANCE, rtol=0)


def test_bf16_is_close_to_fp32(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, config=tiny_config())
    tokens = tokens_of(20)
    wide, narrow = (run_chunks(load(folder, dtype), tokens, [20]) for dtype in ("float32", "bfloat16"))
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - wide).abs().max() < 0.05 * wide.abs().max()


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    model = tiny_llama(attention=TorchAttention())
    first, second = tokens_of(9, seed=1), tokens_of(5, seed=2)
    alone = [run_chunks(model, tokens, [len(tokens)]) for tokens in (first, second)]
    batch = make_batch([(9, 9, [5, 2, 0]), (5, 5, [1, 3])], page_size=4)
    with torch.inference_mode():
        hidden, _ = model.forward(torch.cat((first, second)), batch, make_kv(model, page_size=4))
        together = model.logits(hidden)
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


def test_backends_agree() -> None:
    tokens = tokens_of(30)
    ours, reference = (
        run_chunks(tiny_llama(attention=backend), tokens, [19, 11])
        for backend in (TorchAttention(), ReferenceAttention())
    )
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=0)


def test_truncated_shares_weights_and_equals_a_shallower_model(tmp_path: Path) -> None:
    config = tiny_config(num_layers=3)
    model = tiny_llama(config=config)
    shallow = model.truncated(2)
    same = tiny_llama(config=tiny_config(num_layers=2), weights=tiny_weights(config))
    tokens = tokens_of(12)
    assert torch.equal(run_chunks(shallow, tokens, [12]), run_chunks(same, tokens, [12]))
    assert not torch.allclose(run_chunks(shallow, tokens, [12]), run_chunks(model, tokens, [12]))
    assert shallow.shape.num_layers == 2
    assert model.shape.num_layers == 3
    assert shallow.layers[1] is model.layers[1]
    assert shallow.weight_bytes() == same.weight_bytes() < model.weight_bytes()
    for count in (0, 4):
        with pytest.raises(ModelError, match="3 layers"):
            model.truncated(count)


def test_features_are_transformers_hidden_states(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(num_layers=8)
    folder = write_hf_folder(tmp_path, config=config)
    tokens, model = tokens_of(6), load(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = reference(tokens[None], output_hidden_states=True).hidden_states  # entry i enters layer i
        batch = make_batch([(6, 6, [0])])
        hidden, last = model.forward(tokens, batch, make_kv(model), features="last")
        again, aux = model.forward(tokens, batch, make_kv(model), features="aux")
    assert last is hidden
    assert torch.equal(again, hidden)
    torch.testing.assert_close(hidden, states[8][0], atol=TOLERANCE, rtol=0)
    expected = torch.cat([states[i][0] for i in (2, 4, 5)], dim=-1)
    torch.testing.assert_close(aux, expected, atol=TOLERANCE, rtol=0)


def test_features_that_do_not_exist() -> None:
    model = tiny_llama(num_layers=2)
    tokens, batch = tokens_of(6), make_batch([(6, 6, [0])])
    for features in ("aux", "first"):  # aux: two layers have no third
        with pytest.raises(ModelError, match=features):
            model.forward(tokens, batch, make_kv(model), features=features)


def test_padded_vocabulary_widens_the_logits(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_hf_folder(tmp_path, config=config, weights=padded(tiny_weights(config), 104))
    model = load(folder)
    logits = run_chunks(model, tokens_of(5), [5])
    assert model.shape.vocab_size == logits.shape[1] == 104
    assert not logits[:, 97:].any()
    torch.testing.assert_close(
        logits[:, :97], run_chunks(tiny_llama(config=config), tokens_of(5), [5]), atol=1e-5, rtol=0
    )


def test_tied_weights_count_once() -> None:
    tied, untied = tiny_llama(tied=True), tiny_llama(tied=False)
    assert untied.weight_bytes() - tied.weight_bytes() == 97 * 64 * 4


def test_a_stored_head_that_differs_wins_over_tying(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_hf_folder(tmp_path, config=dataclasses.replace(config, tied=True), weights=tiny_weights(config))
    tokens = tokens_of(8)
    torch.testing.assert_close(
        run_chunks(load(folder), tokens, [8]), reference_logits(folder, tokens), atol=TOLERANCE, rtol=0
    )


def test_greedy_is_deterministic_and_not_degenerate() -> None:
    text = greedy(tiny_llama(), [1, 2, 3], 24)
    assert text == greedy(tiny_llama(attention=TorchAttention()), [1, 2, 3], 24, page_size=1)
    assert len(set(text)) > 8


def test_llama3_rope_differs_from_plain() -> None:
    tokens = tokens_of(40)
    weights = tiny_weights(tiny_config())
    plain, scaled = (
        run_chunks(
            Llama(tiny_config(rope=rope), weights, attention=ReferenceAttention(), dtype=torch.float32, device=CPU),
            tokens,
            [40],
        )
        for rope in (RopeConfig(), LLAMA3_ROPE)
    )
    assert (plain - scaled).abs().max() > 1e-2


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"sliding_window": 128}, "sliding window of 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_hidden_layers": 1 << 40}, "num_layers"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"eos_token_id": ["2"]}, "eos_token_id"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        config_from_hf(BASE | changes, architecture="LlamaForCausalLM")


def test_config_defaults_and_lists() -> None:
    config = config_from_hf(BASE | {"eos_token_id": [2, 5], "torch_dtype": "bfloat16"}, architecture="LlamaForCausalLM")
    assert config == LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16,
        max_position=2048, dtype="bfloat16", eos_ids=(2, 5), bos_id=1,
    )  # fmt: skip
    assert config_from_hf(BASE | {"sliding_window": 4096}, architecture="LlamaForCausalLM").max_position == 2048
    qwen = config_from_hf(BASE | {"sliding_window": 64, "num_key_value_heads": 2}, architecture="Qwen2ForCausalLM")
    assert (qwen.qkv_bias, qwen.output_bias) == (True, False)
    with pytest.raises(ModelError, match="sliding window of 4096"):
        config_from_hf(BASE | {"num_key_value_heads": 2}, architecture="MistralForCausalLM")


def test_loaded_model_says_how_to_serve_it(tmp_path: Path) -> None:
    generation = {"eos_token_id": [2, 0], "bos_token_id": 3, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    loaded = load_target(
        write_hf_folder(tmp_path / "m", generation=generation), dtype="auto", device=CPU, attention=TorchAttention()
    )
    assert loaded.eos_ids == (2, 0)
    assert loaded.bos_id == 3
    assert loaded.generation_defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert loaded.name == "m"
    assert loaded.weight_bytes == loaded.model.weight_bytes()
    assert loaded.model.dtype == torch.float32
    bare = load_target(
        write_hf_folder(tmp_path / "b", generation={}), dtype="auto", device=CPU, attention=TorchAttention()
    )
    assert (bare.eos_ids, bare.bos_id, bare.generation_defaults) == ((2,), 1, {})


def test_generation_defaults_follow_do_sample() -> None:
    stated = {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1}
    assert generation_defaults(stated | {"do_sample": True, "max_length": 20}) == stated
    assert generation_defaults(stated | {"do_sample": False}) == {"repetition_penalty": 1.1}
    for bad in ({"temperature": "hot"}, {"top_p": 1.5}, {"top_k": 2.5}, {"repetition_penalty": 0}, {"min_p": True}):
        with pytest.raises(ModelError, match=next(iter(bad))):
            generation_defaults(bad)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["DeepseekV9ForCausalLM"]}, "DeepseekV9ForCausalLM"),
        ({"architectures": []}, "architectures"),
        ([], "not a JSON object"),
    ],
)
def test_unknown_architectures_are_named(config: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_paths_and_dtypes_that_cannot_be_loaded(tmp_path: Path) -> None:
    pickled = tmp_path / "model.bin"
    pickled.write_bytes(b"\x80\x04.")
    for path, message in ((tmp_path / "none", "no such"), (pickled, "pickled"), (tmp_path, "not a model folder")):
        with pytest.raises(ModelError, match=message):
            load(path)
    with pytest.raises(ModelError, match="fp16"):
        load(write_hf_folder(tmp_path / "m"), "fp16")


@pytest.mark.real
def test_real_model_in_a_folder_equals_transformers(real_model_path: Path, tmp_path: Path) -> None:
    """The GGUF's weights as a Hugging Face folder: both loaders of ours, and transformers', give the same logits."""
    file = GgufFile(real_model_path)
    config = dataclasses.replace(
        file.config, num_layers=8
    )  # eight of thirty layers prove the same in a quarter of the time
    weights = {name: file[name] for name in config.weight_shapes()}
    folder = write_hf_folder(tmp_path, config=config, weights=weights)
    tokens = tokens_of(24, vocab=49152)
    expected = reference_logits(folder, tokens)
    assert len(SafetensorsFolder(folder)) == len(weights)
    from_folder = run_chunks(load(folder), tokens, [24])
    from_gguf = run_chunks(load(real_model_path).truncated(8), tokens, [20, 4])
    for ours in (from_folder, from_gguf):
        torch.testing.assert_close(ours, expected, atol=3e-4, rtol=0)
        assert torch.equal(ours.argmax(-1), expected.argmax(-1))


@pytest.mark.real
def test_real_model_knows_a_capital(real_model_path: Path) -> None:
    """<|im_start|>user What is the capital of France?<|im_end|> <|im_start|>assistant, greedily."""
    model = load(real_model_path)
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert greedy(model, prompt, 8) == [504, 3575, 282, 4649, 314, 7042, 30, 2]
