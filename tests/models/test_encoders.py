"""Every architecture against transformers, on tiny random weights in float32: red if any formula, name or position
differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from archerfish.engine import inference_core
from archerfish.engine.inference_core import InferenceCore
from archerfish.errors import UnsupportedModelError
from archerfish.kernels.batches import Segments
from archerfish.kernels.formats import choose_format
from archerfish.kernels.torch.reference import TorchOps
from archerfish.layers.rotary import read_rotary, rotary_table
from archerfish.models.adapter import TokenBatch

LENGTHS = (7, 1, 19, 33, 7, 60, 4)
COMMON = {"vocab_size": 120, "num_hidden_layers": 3, "max_position_embeddings": 70}
SIZES = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80, **COMMON}
DISTIL = {"dim": 48, "n_heads": 4, "hidden_dim": 80, "n_layers": 3, "vocab_size": 120, "max_position_embeddings": 70}
MODERN = {"local_attention": 12, "num_hidden_layers": 4, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SIZES, "hidden_act": "gelu"}),
    "bert-gelu-new": ("Bert", {**SIZES, "hidden_act": "gelu_new"}),
    "roberta": ("Roberta", {**SIZES, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}),
    "xlm-roberta": ("XLMRoberta", {**SIZES, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}),
    "distilbert": ("DistilBert", DISTIL),
    "mpnet": ("MPNet", {**SIZES, "relative_attention_num_buckets": 32, "pad_token_id": 1}),
    "modernbert": ("ModernBert", {**SIZES, **MODERN}),
    "modernbert-biases": (
        "ModernBert",
        {**SIZES, **MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
    "nomic": ("NomicBert", {**SIZES, "hidden_act": "silu"}),
    "gte": ("Gte", {**SIZES, "hidden_act": "gelu", "pad_token_id": 1}),
    "gte-no-types": ("Gte", {**SIZES, "type_vocab_size": 0, "pad_token_id": 1}),
    "jina-v3": ("JinaEmbeddingsV3", {**SIZES, "type_vocab_size": 1, "pad_token_id": 1}),
    "eurobert": ("EuroBert", {**SIZES, "pad_token_id": 1, "classifier_pooling": "mean", "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", DECODER),
    "qwen2": ("Qwen2", DECODER),
    "mistral": ("Mistral", {**DECODER, "sliding_window": 9}),
    "gemma2": ("Gemma2", {**DECODER, "sliding_window": 9, "attn_logit_softcapping": 3.0}),
    "gemma3-both-ways": ("Gemma3Text", {**DECODER, "sliding_window": 16, "use_bidirectional_attention": True}),
    "qwen2-both-ways": ("Qwen2", {**DECODER, "is_causal": False}),
    "granite": ("Granite", {**DECODER, "logits_scaling": 7.0, "residual_multiplier": 0.3}),
    "glm4": ("Glm4", {**DECODER, "head_dim": 8}),
    "olmo2": ("Olmo2", DECODER),
    "cohere": ("Cohere", DECODER),
}


def make(kind: str, suffix: str, **extra: Any) -> tuple[Any, dict[str, Any]]:
    """A random transformers model of a kind, and its config.json."""
    torch.manual_seed(1)
    family, sizes = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**sizes, **extra)
    model = getattr(transformers, f"{family}{suffix}")(config).eval()
    for parameter in model.parameters():  # the default initialisation is too small to show a wrong formula
        torch.nn.init.normal_(parameter, std=0.2)
    values = config.to_dict()
    values["architectures"] = [f"{family}{suffix}"]
    return model, values


def batch_of(vocab_size: int, lengths: tuple[int, ...] = LENGTHS, *, types: bool = False) -> TokenBatch:
    random = np.random.default_rng(0)
    ids = random.integers(3, vocab_size, sum(lengths))
    type_ids = random.integers(0, 2, sum(lengths)) if types else None
    return TokenBatch(ids, Segments(lengths), type_ids)


def each_sequence(batch: TokenBatch) -> list[dict[str, torch.Tensor]]:
    """The batch as transformers takes it, one sequence at a time, so that no padding rule can hide a difference."""
    rows = []
    for start, end in zip(batch.segments.starts[:-1], batch.segments.starts[1:], strict=True):
        row = {"input_ids": torch.tensor(batch.token_ids[start:end])[None]}
        if batch.type_ids is not None:
            row["token_type_ids"] = torch.tensor(batch.type_ids[start:end])[None]
        rows.append(row)
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_hidden_states_equal_transformers(kind: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = make(kind, "Model")
    if backend == "torch":
        monkeypatch.setattr(inference_core, "choose_ops", lambda *_: TorchOps())
    core = InferenceCore(model.state_dict(), config, dtype="float32", pooling="lasttoken")
    batch = batch_of(config["vocab_size"], types=kind.startswith("bert"))
    ours = core.ops.to_numpy(core.encoder.forward(batch))
    with torch.inference_mode():
        theirs = [model(**row).last_hidden_state[0] for row in each_sequence(batch)]
    torch.testing.assert_close(torch.from_numpy(ours), torch.cat(theirs), atol=1e-4, rtol=1e-4)
    last = torch.stack([rows[-1] for rows in theirs])
    torch.testing.assert_close(torch.from_numpy(core.run(batch)), last, atol=1e-4, rtol=1e-4)  # as it is replayed


@pytest.mark.parametrize("kind", KINDS)
def test_int8_weights_equal_the_dequantised_model(kind: str) -> None:
    int8 = choose_format("int8")
    model, config = make(kind, "Model")
    weights = {name: each for name, each in model.state_dict().items() if "pooler" not in name}
    wide = {
        name: each
        if each.dim() != 2 or "embeddings" in name or "relative" in name
        else int8.dequantise(int8.load(each), torch.float32)
        for name, each in weights.items()
    }
    batch = batch_of(config["vocab_size"])
    expected = InferenceCore(wide, config, dtype="float32", pooling="mean").run(batch)
    found = InferenceCore(weights, config, dtype="float32", pooling="mean", weight_format="int8").run(batch)
    assert np.linalg.norm(found - expected) < 0.04 * np.linalg.norm(expected)  # activations have 8 bits, too


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if "both-ways" not in kind and kind not in ("granite", "cohere")]
)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classifier_scores_equal_transformers(kind: str, num_labels: int) -> None:
    model, config = make(kind, "ForSequenceClassification", num_labels=num_labels)
    core = InferenceCore(model.state_dict(), config, dtype="float32")
    batch = batch_of(config["vocab_size"])
    with torch.inference_mode():
        theirs = torch.cat([model(**row).logits for row in each_sequence(batch)])
    np.testing.assert_allclose(core.run(batch), theirs.numpy(), atol=2e-4, rtol=1e-3)


OWN_NOMIC = {
    "model_type": "nomic_bert",
    "vocab_size": 120,
    "type_vocab_size": 2,
    "n_embd": 48,
    "n_head": 4,
    "n_inner": 80,
    "n_layer": 3,
    "n_positions": 70,
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000,
    "activation_function": "swiglu",
    "rotary_emb_fraction": 1.0,
    "num_experts": 0,
}
NOMIC_NAMES = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
    "embeddings.LayerNorm": "emb_ln",
    "layers.": "encoder.layers.",
}


def test_files_of_nomics_own_code() -> None:
    model, _ = make("nomic", "Model")
    weights = {name: each for name, each in model.state_dict().items() if "self_attn" not in name or "o_proj" in name}
    for i, layer in enumerate(model.layers):
        parts = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        weights[f"layers.{i}.attn.Wqkv.weight"] = torch.cat([part.weight for part in parts]).detach()
    for name, own in NOMIC_NAMES.items():
        weights = {key.replace(name, own): each for key, each in weights.items()}
    batch = batch_of(120, types=True)
    found = InferenceCore(weights, OWN_NOMIC, dtype="float32").run(batch)
    expected = InferenceCore(model.state_dict(), model.config.to_dict(), dtype="float32").run(batch)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match="num_experts = 8"):
        InferenceCore(weights, {**OWN_NOMIC, "num_experts": 8})


def test_rotary_scaling_of_gte() -> None:
    """TEI's rule: a larger base, and all frequencies divided by the factor to the power of 2 / dim."""
    values = {"rope_theta": 500.0, "rope_scaling": {"type": "ntk", "factor": 4.0}, "max_position_embeddings": 9}
    table, _ = rotary_table(read_rotary(values), 8, 9)
    frequencies = np.array([2000.0 ** -(i / 8) / 4**0.25 for i in (0, 2, 4, 6)])
    np.testing.assert_allclose(table[:, :4], np.cos(np.arange(9)[:, None] * frequencies), atol=1e-5)


def test_longest_mpnet_distances_fall_into_transformers_buckets() -> None:
    """Distances beyond 128 share the last bucket."""
    from archerfish.models.bert import distance_buckets

    theirs: Any = transformers.models.mpnet.modeling_mpnet.MPNetEncoder
    position = torch.arange(300)
    expected = theirs.relative_position_bucket(position[None, :] - position[:, None], num_buckets=32)
    np.testing.assert_array_equal(distance_buckets(300, 32), expected.numpy())


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens"])
def test_pooling_modes(pooling: str) -> None:
    model, config = make("bert", "Model")
    core = InferenceCore(model.state_dict(), config, dtype="float32", pooling=pooling)
    batch = batch_of(config["vocab_size"])
    with torch.inference_mode():
        hidden = [model(**row).last_hidden_state[0] for row in each_sequence(batch)]
    rules = {
        "mean": lambda h: h.mean(0),
        "cls": lambda h: h[0],
        "lasttoken": lambda h: h[-1],
        "max": lambda h: h.max(0).values,
        "mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5,
    }
    expected = torch.stack([rules[pooling](h) for h in hidden])
    np.testing.assert_allclose(core.run(batch), expected.numpy(), atol=1e-4, rtol=1e-3)


def test_forward_drops_masked_tokens() -> None:
    model, config = make("bert", "Model")
    core = InferenceCore(model.state_dict(), config, dtype="float32")
    ids = torch.randint(3, 120, (3, 9))
    mask = (torch.arange(9)[None] < torch.tensor([9, 4, 1])[:, None]).long()
    with torch.inference_mode():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    expected = core.mean_pooling(hidden, mask)
    torch.testing.assert_close(core.forward(ids, mask), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling": "median"}, "median"),
        ({"model_type": "xlm_roberta"}, "Did you mean 'xlm-roberta'"),
        ({"model_type": "deberta"}, "'deberta'. docs/embed.md .*Supported: bert, "),
        ({"hidden_act": "swoosh"}, "swoosh"),
        ({"model_type": "rwkv7"}, "LLMEngine and `archerfish generate` take it"),
        ({"num_attention_heads": 5}, "5 heads"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"position_embedding_type": "relative_key"}, "absolute"),
        ({"model_type": ""}, "states no model_type"),
    ],
)
def test_configurations_that_cannot_run_are_refused(change: dict[str, Any], message: str) -> None:
    model, config = make("bert", "Model")
    with pytest.raises(UnsupportedModelError, match=message):
        InferenceCore(model.state_dict(), {**config, **change}, pooling=change.get("pooling"))


def test_an_architecture_can_be_added_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    from archerfish.models import adapter
    from archerfish.models.bert import BertEncoder

    monkeypatch.setitem(adapter.ENCODERS, "mine", BertEncoder)
    model, config = make("bert", "Model")
    core = InferenceCore(model.state_dict(), {**config, "model_type": "mine"}, dtype="float32")
    assert core.run(batch_of(config["vocab_size"])).shape == (len(LENGTHS), 48)
