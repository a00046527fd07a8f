"""Every decoder against transformers, on tiny random weights: red if any formula, name, position, mask or block
differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from archerfish.errors import TensorError, UnsupportedModelError
from archerfish.kernels.formats import choose_format
from archerfish.kernels.torch.reference import TorchOps
from archerfish.models.adapter import KVShape, model_class
from archerfish.models.config import Config
from archerfish.models.llama import LlamaModel
from tests.kernels.native_support import native_ops
from tests.models import recurring
from tests.models.decoding import KINDS, LENGTH, LONGROPE, Driver, make, random_tokens, their_logits
from tests.models.recurring import RecurrentDriver, StepDriver

BACKENDS = [TorchOps, native_ops]
Backend = Callable[..., Any]
# (sequence, new tokens) of each step: a prefill, chunks that end inside blocks, decodes, and all of these together
STEPS = [
    [(0, 37)],
    [(1, 5)],
    [(0, 1), (1, 16)],
    [(0, 1), (2, 23), (1, 9)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 1), (0, 1), (1, 1)],
    [(1, 1), (0, 2), (2, 7)],
    [(2, 1)],
    [(3, LENGTH)],
    [(0, 1), (1, 1), (2, 1)],
    [(1, 26), (0, 16), (2, 26)],
]


LONGEST = {"phi3-longrope": 64, "phi4-mini": 64, "ministral3": 64, "llama-dynamic": 32}


@cache
def expected_logits(kind: str) -> list[torch.Tensor]:
    return [their_logits(make(kind)[0], tokens) for tokens in random_tokens(4)]


def check(driver: Driver, kind: str) -> None:
    driver.check(STEPS, expected_logits(kind))
    assert driver.num_computed == [LENGTH] * 4


@pytest.mark.parametrize(
    ("kind", "backend", "block_size"),
    [(kind, backend, (1, 16)[(i + j) % 2]) for i, kind in enumerate(KINDS) for j, backend in enumerate(BACKENDS)],
)
def test_logits_equal_transformers(kind: str, backend: Backend, block_size: int) -> None:
    model, config = make(kind)
    check(Driver(backend(), model.state_dict(), config, random_tokens(4), block_size=block_size), kind)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("mistral-window", {"block_size": size}) for size in (3, 40, 256)),
        *((kind, {"is_deterministic": True}) for kind in ("llama", "mistral-window", "gemma2")),
    ],
)
def test_odd_block_sizes_and_deterministic_batches(kind: str, options: dict[str, Any]) -> None:
    model, config = make(kind)
    check(Driver(native_ops(), model.state_dict(), config, random_tokens(4), **options), kind)


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "qwen3",
        "gemma2",
        "gemma3",
        "phi3",
        "granite",
        "olmo3",
        "cohere2",
        "gpt2",
        "gpt-oss",
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(kind: str, backend: Backend, dtype: str) -> None:
    model, config = make(kind)
    weights = {name: w.to(getattr(torch, dtype)) if w.dim() == 2 else w for name, w in model.state_dict().items()}
    driver = Driver(backend(dtype=dtype), weights, config, random_tokens(1))
    expected = their_logits(model, driver.tokens[0])
    error = (torch.cat([driver.step([(0, n)])[0] for n in (LENGTH - 1, 1)]) - expected).norm() / expected.norm()
    assert error < (0.03 if dtype == "bfloat16" else 0.004)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "qwen2",
        "qwen3",
        "mistral-window",
        "gemma2",
        "gemma3",
        "phi3",
        "glm4",
        "olmo3",
        "cohere2",
        "starcoder2-plain",
        "qwen2-moe",
    ],
)
def test_int8_weights_equal_the_dequantised_model(kind: str, backend: Backend) -> None:
    int8 = choose_format("int8")
    model, config = make(kind)
    weights = dict(model.state_dict())
    embedding = weights["model.embed_tokens.weight"]
    head = weights["lm_head.weight"]  # a tied head is quantised, its table is not
    wide = {
        name: int8.dequantise(int8.load(each.flatten(0, -2)), torch.float32).view(each.shape)
        if each.dim() > 1 and each is not embedding and not is_router(name)
        else each
        for name, each in (weights | {"lm_head.weight": head.clone()}).items()
    }
    tokens, work = random_tokens(2), [(0, 20), (1, 7)]
    expected = Driver(TorchOps(), wide, {**config, "tie_word_embeddings": False}, tokens).step(work)
    found = Driver(backend(), weights, config, tokens, weight_format=int8).step(work)
    error = (torch.cat(found) - torch.cat(expected)).norm() / torch.cat(expected).norm()
    assert error < (1e-4 if backend is TorchOps else 0.04)  # activations of native products have 8 bits, too


def is_router(name: str) -> bool:
    return name.endswith((".gate.weight", "_gate.weight"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral"])
def test_checkpoints_with_a_tensor_for_each_expert(kind: str, backend: Backend) -> None:
    model, config = make(kind)
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    weights = dict[str, torch.Tensor]()
    for name, tensor in model.state_dict().items():
        stem = name.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else name
        if tensor.dim() < 3:
            weights[stem] = tensor
            continue
        scope, _, which = stem.rpartition(".")
        parts = zip(names[:2], tensor.chunk(2, 1), strict=True) if which == "gate_up_proj" else [(names[2], tensor)]
        weights |= {f"{scope}.{i}.{part}.weight": each for part, stack in parts for i, each in enumerate(stack)}
    check(Driver(backend(), weights, config, random_tokens(4)), kind)


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "llama-linear",
        "llama-llama3",
        "llama-yarn",
        "qwen2-window",
        "gemma3",
        "gemma3-scaled",
        "phi3-partial",
        "glm4",
        "olmo3-yarn",
        "cohere2",
        "smollm3-window",
        "gpt-oss",
    ],
)
def test_configurations_in_the_form_before_transformers_5(kind: str) -> None:
    model, config = make(kind)
    check(Driver(native_ops(), model.state_dict(), older_form(config), random_tokens(4)), kind)


def older_form(config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_scaling and rope_local_base_freq instead of rope_parameters; no layer_types."""
    values = {
        name: value for name, value in config.items() if name not in ("rope_parameters", "layer_types", "head_dim")
    }
    rope = dict(config["rope_parameters"])
    if config["model_type"] == "gemma3_text":
        values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        values["sliding_window_pattern"] = config["layer_types"].index("full_attention") + 1
        values["head_dim"] = config["head_dim"]
    if config["model_type"] == "gpt_oss":
        values["head_dim"] = config["head_dim"]
    if config["model_type"] == "olmo3":
        values["layer_types"] = config["layer_types"]
    rope = dict(rope.get("full_attention", rope))
    values["rope_theta"] = rope.pop("rope_theta")
    values["partial_rotary_factor"] = rope.pop("partial_rotary_factor", None)
    values["rope_scaling"] = None if rope.get("rope_type") == "default" else {**rope, "type": rope["rope_type"]}
    return values


def test_checkpoints_without_the_model_prefix() -> None:
    model, config = make("llama-tied")
    weights = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    check(Driver(TorchOps(), weights, config, random_tokens(4)), "llama-tied")


@pytest.mark.parametrize("kind", KINDS)
def test_facts_that_are_known_before_loading(kind: str) -> None:
    model, config = make(kind)
    values = Config(config)
    architecture = model_class(values)
    ours = architecture.noted(values).shapes
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        theirs.pop("lm_head.weight", None)
    assert ours == theirs
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_shape = KVShape(
        config["num_hidden_layers"], config.get("num_key_value_heads", config["num_attention_heads"]), head_dim
    )
    assert architecture.memory_shape(values) == kv_shape
    assert architecture.vocab_size(values) == 97
    assert architecture.max_positions(values) == LONGEST.get(kind, 128)


@pytest.mark.parametrize("kind", ["phi3-longrope", "phi4-mini"])
def test_longer_contexts_of_longrope(kind: str) -> None:
    """max_len beyond the length that the short factors are for takes the long ones, as transformers does for longer
    texts."""
    model, config = make(kind)
    tokens = random_tokens(2)
    tokens = [[*tokens[0], *tokens[1][:40]]]
    driver = Driver(TorchOps(), model.state_dict(), config, tokens, max_len=128)
    torch.testing.assert_close(driver.step([(0, 100)])[0], their_logits(model, tokens[0]), atol=1e-4, rtol=1e-4)
    assert model_class(Config(config)).most_positions(Config(config)) == 128


def test_the_longest_context_of_yarn_follows_from_its_factor() -> None:
    _, config = make("llama-yarn")
    config = {**config, "rope_parameters": {**config["rope_parameters"], "factor": 40.0}}
    assert LlamaModel.max_positions(Config(config)) == 40 * 32


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("phi3-longrope", {"rope_parameters": {**LONGROPE, "long_factor": [1.0]}}, "8 numbers in 'long_factor'"),
        ("gemma3", {"layer_types": ["full_attention"]}, "each of 7 layers"),
        ("gemma3", {"use_bidirectional_attention": True}, "both directions"),
        ("llama", {"model_type": "Gemma3-Text"}, "Did you mean 'gemma3_text'"),
        ("llama", {"model_type": "qwen3_next"}, "others a recurrent state"),
        (
            "llama",
            {"model_type": "olmo4"},
            "'olmo4'. The nearest that is supported is 'olmo3'. docs/add-a-model.md .*: llama, ",
        ),
        ("llama", {"model_type": "gpt_neox"}, "nearest that is supported is 'starcoder2'"),
        ("llama", {"model_type": "dbrx"}, "'dbrx'. docs/add-a-model.md"),
        (
            "llama",
            {"model_type": "llava", "text_config": {"model_type": "llama"}},
            "'llama', which is supported where it is saved",
        ),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn"),
        ("llama", {"model_type": "deepseek_v3"}, "compressed keys"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0"),
        ("qwen3-moe", {"moe_intermediate_size": 24}, "multiples of 16"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("llama", {"model_type": "bert"}, "ArrowEngine and `archerfish embed` take it"),
        ("llama", {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "'mrope' is not supported"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "'linear' has factor = None, which must be a number",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": "2", "rope_theta": 1e4}},
            "has factor = '2', which must be a number",
        ),
        ("llama", {"rope_parameters": "yes"}, "'yes'"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.01}}, "rotated in pairs"),
        ("llama", {"hidden_act": "swoosh"}, "swoosh"),
        ("llama", {"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ("llama", {"hidden_size": "big"}, "hidden_size"),
    ],
)
def test_configurations_that_cannot_run_are_refused(kind: str, change: dict[str, Any], message: str) -> None:
    model, config = make(kind)
    with pytest.raises(UnsupportedModelError, match=message):
        Driver(TorchOps(), model.state_dict(), {**config, **change}, random_tokens(1), max_len=65)


K_PROJ = "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "message"),
    [
        *(("llama", name, None, name) for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight")),
        ("qwen2", f"{K_PROJ}.bias", None, f"{K_PROJ}.bias"),
        ("llama", f"{K_PROJ}.weight", torch.ones(64, 64), r"k_proj\.weight.*\(64, 64\).*\(32, 64\)"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(
    kind: str, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    model, config = make(kind)
    weights = {key: tensor if key == name else value for key, value in model.state_dict().items()}
    present = {key: value for key, value in weights.items() if value is not None}
    with pytest.raises(TensorError, match=message):
        Driver(TorchOps(), present, config, random_tokens(1))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("archerfish.models.llama:LlamaModel", ""),
        ("no_such_module:Model", "is broken"),
        ("archerfish.models.config:Config", "no ModelAdapter"),
    ],
)
def test_an_installed_package_can_bring_an_architecture(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    point = EntryPoint("packaged", value, "archerfish.models")
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda *, group: [point] if group == "archerfish.models" else []
    )
    if not message:
        assert model_class(Config({"model_type": "packaged"})) is LlamaModel
        return
    with pytest.raises(UnsupportedModelError, match=message):
        model_class(Config({"model_type": "packaged"}))
    with pytest.raises(UnsupportedModelError, match="Did you mean 'packaged'"):
        model_class(Config({"model_type": "Packaged"}))


# Rows of the last layer that nobody asks for are not computed
KEPT_STEPS = [
    [(0, 9)],
    [(0, 1), (1, 17)],
    [(0, 1), (1, 1)],
    [(0, 20), (1, 3)],
    [(0, 1), (1, 1)],
]  # (sequence, new tokens)


def check_kept(plain: StepDriver, kept: StepDriver) -> None:
    """What is behind a step may depend on rows that it left out: their keys and states must be there."""
    assert kept.model.gives_kept_rows
    for work in KEPT_STEPS:
        expected = torch.cat([logits[-1:] for logits in plain.step(work)])
        torch.testing.assert_close(torch.cat(kept.step(work, keeps_last=True)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind", ["llama", "llama-biases", "qwen3", "gemma2", "phi3", "olmo3", "cohere2", "gpt2", "gpt-oss"]
)
def test_kept_rows(kind: str, backend: Backend) -> None:
    model, config = make(kind)
    plain, kept = (Driver(backend(), model.state_dict(), config, random_tokens(2)) for _ in range(2))
    check_kept(plain, kept)


def test_kept_rows_of_rwkv7(tmp_path: Path) -> None:
    size = recurring.SIZES["tiny"]
    config, weights = recurring.read_rwkv7(recurring.write_checkpoint(size, tmp_path / "model.pth"))
    tokens = recurring.random_tokens(size, 2, 40)
    plain, kept = (RecurrentDriver(native_ops(), weights, config, tokens) for _ in range(2))
    check_kept(plain, kept)
