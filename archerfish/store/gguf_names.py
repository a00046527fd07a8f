"""What GGUF calls things and what Hugging Face calls them: tensors and configuration, one table per architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from archerfish.errors import CorruptFileError, UnsupportedModelError

DECODER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.#.attn_norm": "model.layers.#.input_layernorm",
    "blk.#.attn_q": "model.layers.#.self_attn.q_proj",
    "blk.#.attn_k": "model.layers.#.self_attn.k_proj",
    "blk.#.attn_v": "model.layers.#.self_attn.v_proj",
    "blk.#.attn_output": "model.layers.#.self_attn.o_proj",
    "blk.#.ffn_norm": "model.layers.#.post_attention_layernorm",
    "blk.#.ffn_gate": "model.layers.#.mlp.gate_proj",
    "blk.#.ffn_up": "model.layers.#.mlp.up_proj",
    "blk.#.ffn_down": "model.layers.#.mlp.down_proj",
}
HEAD_NORM_TENSORS = {
    "blk.#.attn_q_norm": "model.layers.#.self_attn.q_norm",
    "blk.#.attn_k_norm": "model.layers.#.self_attn.k_norm",
}
GEMMA_TENSORS = {
    **DECODER_TENSORS,
    "blk.#.post_attention_norm": "model.layers.#.post_attention_layernorm",
    "blk.#.ffn_norm": "model.layers.#.pre_feedforward_layernorm",
    "blk.#.post_ffw_norm": "model.layers.#.post_feedforward_layernorm",
}
PHI3_TENSORS = {
    **{name: target for name, target in DECODER_TENSORS.items() if name != "blk.#.ffn_gate"},
    "blk.#.attn_qkv": "model.layers.#.self_attn.qkv_proj",
    "blk.#.ffn_up": "model.layers.#.mlp.gate_up_proj",
}
BERT_TENSORS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.#.attn_q": "encoder.layer.#.attention.self.query",
    "blk.#.attn_k": "encoder.layer.#.attention.self.key",
    "blk.#.attn_v": "encoder.layer.#.attention.self.value",
    "blk.#.attn_output": "encoder.layer.#.attention.output.dense",
    "blk.#.attn_output_norm": "encoder.layer.#.attention.output.LayerNorm",
    "blk.#.ffn_up": "encoder.layer.#.intermediate.dense",
    "blk.#.ffn_down": "encoder.layer.#.output.dense",
    "blk.#.layer_output_norm": "encoder.layer.#.output.LayerNorm",
}
# Tensors that are configuration in Hugging Face's files, not weights.
CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

SHARED_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
DECODER_KEYS = {
    **SHARED_KEYS,
    "context_length": "max_position_embeddings",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
GEMMA_KEYS = {
    **DECODER_KEYS,
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
BERT_KEYS = {**SHARED_KEYS, "attention.layer_norm_epsilon": "layer_norm_eps"}
REQUIRED_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture becomes a Hugging Face model."""

    model_type: str
    class_name: str
    tensors: Mapping[str, str]
    keys: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False  # q and k rows are in GGUF's interleaved rotary order
    norm_plus_one: bool = False  # norms are stored as 1 + weight
    finish: Callable[[dict[str, Any], GGUFFacts], None] | None = None


@dataclass(frozen=True)
class GGUFFacts:
    """What a GGUF file says, beside its big tensors."""

    name: str
    fields: Mapping[str, Any]  # without the architecture's prefix for keys that have one
    shapes: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, list[float]]  # values of CONFIG_TENSORS


def finish_llama(config: dict[str, Any], facts: GGUFFacts) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in facts.shapes
    factors = facts.constants.get("rope_freqs.weight")
    if factors is not None:
        config["rope_scaling"] = llama3_scaling(config, facts.name, factors)


def llama3_scaling(config: dict[str, Any], name: str, factors: list[float]) -> dict[str, Any]:
    """Find the Llama 3 scaling of which a GGUF keeps only the resulting factors, and check that it gives just these."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta, factor, low, high, original = config.get("rope_theta", 10000.0), max(factors), 1.0, 4.0, 8192
    for index, found in enumerate(factors):
        wave_length = 2 * 3.141592653589793 * theta ** (2 * index / head_dim)
        if wave_length < original / high:
            expected = 1.0
        elif wave_length > original / low:
            expected = factor
        else:
            smooth = (original / wave_length - low) / (high - low)
            expected = 1 / ((1 - smooth) / factor + smooth)
        if abs(found - expected) > 1e-3 * expected:
            raise UnsupportedModelError(f"{name} has rotary factors (rope_freqs) that are not those of Llama 3.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def finish_gemma(config: dict[str, Any], facts: GGUFFacts) -> None:
    # The 27B models scale queries by their width per head, the others by head_dim; GGUF does not say.
    largest = config["num_hidden_layers"] == {"gemma2": 46}.get(config["model_type"], 62)
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if largest else config.get("head_dim", per_head)


def finish_phi3(config: dict[str, Any], facts: GGUFFacts) -> None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rotary = facts.fields.get("rope.dimension_count", head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    window = facts.fields.get("attention.sliding_window")
    config["sliding_window"] = window or None
    long, short = (facts.constants.get(f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    original = facts.fields.get("rope.scaling.original_context_length")
    if original is not None:
        config["original_max_position_embeddings"] = original
    if long is not None and short is not None:
        config["rope_scaling"] = {"type": "longrope", "rope_type": "longrope", "long_factor": long, "short_factor": short}


def finish_bert(config: dict[str, Any], facts: GGUFFacts) -> None:
    config["max_position_embeddings"] = facts.shapes.get("position_embd.weight", (facts.fields.get("context_length", 512),))[0]
    config["type_vocab_size"] = facts.shapes.get("token_types.weight", (2,))[0]


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", DECODER_TENSORS, DECODER_KEYS, {"hidden_act": "silu"}, permuted=True, finish=finish_llama
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", DECODER_TENSORS, DECODER_KEYS, {"hidden_act": "silu"}),
    "qwen3": Architecture(
        "qwen3", "Qwen3ForCausalLM", {**DECODER_TENSORS, **HEAD_NORM_TENSORS}, DECODER_KEYS, {"hidden_act": "silu"}
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", GEMMA_TENSORS, GEMMA_KEYS,
        {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}, norm_plus_one=True, finish=finish_gemma,
    ),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", {**GEMMA_TENSORS, **HEAD_NORM_TENSORS}, GEMMA_KEYS,
        {"hidden_activation": "gelu_pytorch_tanh", "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
        norm_plus_one=True, finish=finish_gemma,
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", PHI3_TENSORS, DECODER_KEYS, {"hidden_act": "silu"}, finish=finish_phi3),
    "bert": Architecture(
        "bert", "BertModel", BERT_TENSORS, BERT_KEYS, {"hidden_act": "gelu", "position_embedding_type": "absolute"},
        finish=finish_bert,
    ),
}  # fmt: skip
POOLING_TYPES = {0: None, 1: "mean", 2: "cls", 3: "lasttoken"}
BLOCK_NUMBER = re.compile(r"^blk\.(\d+)\.")


def find_architecture(name: str, architecture: Any) -> Architecture:
    found = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if found is None:
        raise UnsupportedModelError(
            f"{name} has the architecture {architecture!r}, which is not supported.",
            hint=f"Supported in GGUF: {', '.join(ARCHITECTURES)}.",
        )
    return found


def tensor_name(architecture: Architecture, name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None when there is none."""
    match = BLOCK_NUMBER.match(name)
    number = match.group(1) if match else ""
    stem, _, suffix = BLOCK_NUMBER.sub("blk.#.", name).rpartition(".")
    target = architecture.tensors.get(stem)
    if target is None or suffix not in ("weight", "bias"):
        return None
    return f"{target.replace('#', number)}.{suffix}"


def make_config(architecture: Architecture, facts: GGUFFacts) -> dict[str, Any]:
    """config.json from the metadata of a GGUF file."""
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **architecture.constants,
    }
    for key, target in architecture.keys.items():
        if key in facts.fields:
            config[target] = facts.fields[key]
    for target in REQUIRED_KEYS:
        value = config.get(target)
        if type(value) is not int or value < 1:
            raise CorruptFileError(f"{facts.name}: the metadata gives {target} as {value!r}.")
    if config["hidden_size"] % config["num_attention_heads"] and "head_dim" not in config:
        raise CorruptFileError(f"{facts.name}: hidden_size is not a multiple of the number of heads.")
    embedding = facts.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2 or embedding[1] != config["hidden_size"]:
        raise CorruptFileError(f"{facts.name}: token_embd.weight is missing or has the shape {embedding}.")
    config["vocab_size"] = embedding[0]
    if architecture.class_name.endswith("ForCausalLM"):
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config["tie_word_embeddings"] = "output.weight" not in facts.shapes
    for role in ("bos", "eos", "pad"):
        # An explicit None where the file says nothing: the defaults of transformers belong to other vocabularies.
        config[f"{role}_token_id"] = facts.fields.get(f"tokenizer.ggml.{'padding' if role == 'pad' else role}_token_id")
    add_rope_scaling(config, facts)
    if architecture.finish is not None:
        architecture.finish(config, facts)
    return config


def add_rope_scaling(config: dict[str, Any], facts: GGUFFacts) -> None:
    kind = facts.fields.get("rope.scaling.type")
    factor = facts.fields.get("rope.scaling.factor", facts.fields.get("rope.scale_linear"))
    if kind in (None, "linear") and factor is not None and factor not in (0.0, 1.0):
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        original = facts.fields.get("rope.scaling.original_context_length")
        config["rope_scaling"] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    elif kind not in (None, "none", "linear", "longrope"):
        raise UnsupportedModelError(f"{facts.name} has the rotary scaling {kind!r}, which is not supported.")


def make_embedding(architecture: Architecture, facts: GGUFFacts) -> dict[str, Any] | None:
    """The `embedding` entry of metadata.json for an encoder."""
    if architecture.model_type != "bert":
        return None
    kind = facts.fields.get("pooling_type", 1)
    if kind not in POOLING_TYPES:
        raise UnsupportedModelError(f"{facts.name} has the pooling type {kind!r}, which is not supported.")
    return {
        "pooling_mode": POOLING_TYPES[kind] or "mean",
        "normalize": True,  # GGUF does not say; its programs always do it
        "max_seq_length": facts.fields.get("context_length"),
        "do_lower_case": False,
        "include_prompt": True,
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": None,
    }
