"""Reader of GGUF files. Tensors get their Hugging Face names and layout, and are dequantised when they are read."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from archerfish.errors import CorruptFileError, UnsupportedModelError
from archerfish.kernels.stored import numpy_type, widened
from archerfish.sizes import RANGES, check_size
from archerfish.store.format import Row, dequantize, first_line, make_quantization, split_blocks
from archerfish.store.source import DTYPE_CODES, ModelSource, SourceTensor, make_embedding, source_info
from archerfish.store.tokenizer_files import make_tokenizer_files, write_files


def layer_tensors(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """Names of the tensors of every layer: GGUF's to Hugging Face's, with # for the number of the layer."""
    return {f"blk.#.{name}": f"{prefix}.#.{target}" for name, target in names.items()}


DECODER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **layer_tensors(
        "model.layers",
        {
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
}
HEAD_NORM_TENSORS = layer_tensors(
    "model.layers", {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
)


def expert_tensors(gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    """The router, the stacked matrices of all experts, and what all rows have beside them."""
    return layer_tensors(
        "model.layers",
        {
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_exps": f"mlp.experts.{gate}",
            "ffn_up_exps": f"mlp.experts.{up}",
            "ffn_down_exps": f"mlp.experts.{down}",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
    )


GEMMA_TENSORS = {
    **DECODER_TENSORS,
    **layer_tensors(
        "model.layers",
        {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
}
PHI3_TENSORS = {
    **{name: target for name, target in DECODER_TENSORS.items() if name != "blk.#.ffn_gate"},
    **layer_tensors("model.layers", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}
OLMO_TENSORS = {
    **DECODER_TENSORS,
    **HEAD_NORM_TENSORS,
    **layer_tensors(
        "model.layers",
        {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
}
GLM4_TENSORS = {
    **DECODER_TENSORS,
    **layer_tensors(
        "model.layers",
        {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
}
GPT2_TENSORS = {
    **DECODER_TENSORS,
    "position_embd": "model.embed_positions",
    **layer_tensors(
        "model.layers",
        {
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
    ),
}
GPT_OSS_TENSORS = {
    **DECODER_TENSORS,
    **expert_tensors(),
    **layer_tensors(
        "model.layers",
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
    ),
}
BERT_TENSORS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    **layer_tensors(
        "encoder.layer",
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
    ),
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
WINDOW_KEYS = {**DECODER_KEYS, "attention.sliding_window": "sliding_window"}
COHERE_KEYS = {**WINDOW_KEYS, "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
GRANITE_KEYS = {
    **DECODER_KEYS,
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GPT2_KEYS = {**DECODER_KEYS, "attention.layer_norm_epsilon": "norm_epsilon"}
GEMMA_KEYS = {
    **WINDOW_KEYS,
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
PHI3_KEYS = {**DECODER_KEYS, "rope.scaling.original_context_length": "original_max_position_embeddings"}
EXPERT_KEYS = {
    **DECODER_KEYS,
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
SAMPLING_KEYS = {  # general.sampling.*, as generation_config.json names them
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
BERT_KEYS = {**SHARED_KEYS, "attention.layer_norm_epsilon": "layer_norm_eps"}


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture becomes a Hugging Face model."""

    model_type: str
    class_name: str
    tensors: Mapping[str, str]
    keys: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    permuted: bool = False  # q and k rows are in GGUF's interleaved rotary order
    norm_plus_one: bool = False  # norms are stored as 1 + weight
    finish: Callable[[dict[str, Any], GGUFFacts], None] | None = None  # adds to the configuration


@dataclass(frozen=True)
class GGUFFacts:
    """What a GGUF file says about the model."""

    name: str
    fields: Mapping[str, Any]  # metadata; keys are without the prefix of the architecture
    shapes: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, list[float]]  # values of CONFIG_TENSORS


def finish_llama(config: dict[str, Any], facts: GGUFFacts) -> None:
    """GGUF keeps only the factors of Llama 3's rotary scaling, which are compared with those that Llama 3 computes."""
    config["attention_bias"] = "blk.0.attn_q.bias" in facts.shapes
    if config["model_type"] == "llama" and facts.fields.get("expert_count"):
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        config |= {
            "num_local_experts": facts.fields["expert_count"],
            "num_experts_per_tok": facts.fields["expert_used_count"],
        }
    factors = facts.constants.get("rope_freqs.weight")
    if factors is None:
        return
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor = max(factors)
    low = 1.0
    high = 4.0
    original = 8192
    wave_lengths = 2 * np.pi * config.get("rope_theta", 10000.0) ** (2 * np.arange(len(factors)) / head_dim)
    smooth = np.clip((original / wave_lengths - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise UnsupportedModelError(f"{facts.name} has rotary factors (rope_freqs) that are not those of Llama 3.")
    config["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def finish_gemma(config: dict[str, Any], facts: GGUFFacts) -> None:
    # The 27B models scale queries by their width per head, the others by head_dim. GGUF does not say which.
    is_27b = config["num_hidden_layers"] == (46 if config["model_type"] == "gemma2" else 62)
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if is_27b else config.get("head_dim", per_head)


def finish_phi3(config: dict[str, Any], facts: GGUFFacts) -> None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rotary = facts.fields.get("rope.dimension_count", head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    config["sliding_window"] = facts.fields.get("attention.sliding_window") or None
    long, short = (facts.constants.get(f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    if long is not None and short is not None:
        config["rope_scaling"] = {
            "type": "longrope",
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
        }


def finish_windows(config: dict[str, Any], facts: GGUFFacts) -> None:
    finish_llama(config, facts)
    pattern = facts.fields.get("attention.sliding_window_pattern")
    config.setdefault("sliding_window", None)
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        config["sliding_window_pattern"] = pattern
    if config["model_type"] == "olmo2" and config["sliding_window"]:
        config |= {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}


def finish_gpt_oss(config: dict[str, Any], facts: GGUFFacts) -> None:
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False


def finish_glm4(config: dict[str, Any], facts: GGUFFacts) -> None:
    if "rope.dimension_sections" in facts.fields:
        raise UnsupportedModelError(f"{facts.name} is the text part of a GLM-4V, which is not supported.")
    finish_llama(config, facts)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["partial_rotary_factor"] = facts.fields.get("rope.dimension_count", head_dim // 2) / head_dim


def finish_gpt2(config: dict[str, Any], facts: GGUFFacts) -> None:
    config["use_bias"] = "blk.0.attn_output.bias" in facts.shapes


def finish_mistral3(config: dict[str, Any], facts: GGUFFacts) -> None:
    finish_llama(config, facts)
    beta, mscale = (
        facts.fields.get(key) for key in ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")
    )
    if config.get("rope_scaling") is not None and mscale:
        config["rope_scaling"] |= {"mscale": 1.0, "mscale_all_dim": mscale, "llama_4_scaling_beta": beta}


def finish_bert(config: dict[str, Any], facts: GGUFFacts) -> None:
    config["max_position_embeddings"] = facts.shapes.get(
        "position_embd.weight", (facts.fields.get("context_length", 512),)
    )[0]
    config["type_vocab_size"] = facts.shapes.get("token_types.weight", (2,))[0]


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", {**DECODER_TENSORS, **expert_tensors("w1", "w3", "w2")}, DECODER_KEYS, permuted=True,
        finish=finish_llama,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", DECODER_TENSORS, DECODER_KEYS),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**DECODER_TENSORS, **HEAD_NORM_TENSORS}, DECODER_KEYS),
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM", DECODER_TENSORS, DECODER_KEYS),
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", {**DECODER_TENSORS, **HEAD_NORM_TENSORS}, DECODER_KEYS),
    "mistral3": Architecture(
        "ministral3", "Ministral3ForCausalLM", DECODER_TENSORS, DECODER_KEYS, {"hidden_act": "silu", "sliding_window": None},
        permuted=True, finish=finish_mistral3,
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", DECODER_TENSORS, DECODER_KEYS, permuted=True, finish=finish_llama),
    "granite": Architecture("granite", "GraniteForCausalLM", DECODER_TENSORS, GRANITE_KEYS, permuted=True, finish=finish_llama),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", GLM4_TENSORS, DECODER_KEYS, finish=finish_glm4),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", OLMO_TENSORS, WINDOW_KEYS, finish=finish_windows),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", OLMO_TENSORS, WINDOW_KEYS, finish=finish_windows),
    "command-r": Architecture("cohere", "CohereForCausalLM", DECODER_TENSORS, COHERE_KEYS),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", DECODER_TENSORS, COHERE_KEYS, finish=finish_windows),
    "starcoder2": Architecture(  # its files do not say that the model has a window
        "starcoder2", "Starcoder2ForCausalLM", GPT2_TENSORS, GPT2_KEYS,
        {"hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096}, finish=finish_gpt2,
    ),
    "gpt2": Architecture("gpt2", "GPT2LMHeadModel", GPT2_TENSORS, GPT2_KEYS, {"hidden_act": "gelu_new"}, finish=finish_gpt2),
    "gemma": Architecture(
        "gemma", "GemmaForCausalLM", DECODER_TENSORS, DECODER_KEYS, {"hidden_activation": "gelu_pytorch_tanh"},
        norm_plus_one=True,
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
    "phi3": Architecture("phi3", "Phi3ForCausalLM", PHI3_TENSORS, PHI3_KEYS, finish=finish_phi3),
    "olmoe": Architecture(
        "olmoe", "OlmoeForCausalLM", {**DECODER_TENSORS, **HEAD_NORM_TENSORS, **expert_tensors()}, EXPERT_KEYS
    ),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", {**DECODER_TENSORS, **expert_tensors()}, EXPERT_KEYS),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", {**DECODER_TENSORS, **HEAD_NORM_TENSORS, **expert_tensors()}, EXPERT_KEYS,
        {"hidden_act": "silu", "norm_topk_prob": True},
    ),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", GPT_OSS_TENSORS, {**EXPERT_KEYS, **WINDOW_KEYS}, finish=finish_gpt_oss
    ),
    "bert": Architecture(
        "bert", "BertModel", BERT_TENSORS, BERT_KEYS, {"hidden_act": "gelu", "position_embedding_type": "absolute"},
        finish=finish_bert,
    ),
}  # fmt: skip
POOLING_TYPES = {0: "mean", 1: "mean", 2: "cls", 3: "lasttoken"}
BLOCK_NUMBER = re.compile(r"^blk\.(\d+)\.")


def make_config(architecture: Architecture, facts: GGUFFacts) -> dict[str, Any]:
    """config.json from the metadata of a GGUF file."""
    stated = {target: facts.fields[key] for key, target in architecture.keys.items() if key in facts.fields}
    names = {"architectures": [architecture.class_name], "model_type": architecture.model_type}
    config: dict[str, Any] = {**names, **architecture.constants, **stated}
    for key, target in architecture.keys.items():
        if target in SHARED_KEYS.values() or (target in config and target in RANGES):
            check_size(target, config.get(target), f"{facts.name} ({key})")
    if config["hidden_size"] % config["num_attention_heads"] and "head_dim" not in config:
        raise CorruptFileError(f"{facts.name}: hidden_size is not a multiple of the number of heads.")
    embedding = facts.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2 or embedding[1] != config["hidden_size"]:
        raise CorruptFileError(f"{facts.name}: token_embd.weight is missing or has the shape {embedding}.")
    config["vocab_size"] = embedding[0]
    if architecture.model_type != "bert":
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
        betas = {f"beta_{end}": facts.fields.get(f"rope.scaling.yarn_beta_{end}") for end in ("fast", "slow")}
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **betas,
        }
    elif kind not in (None, "none", "linear", "longrope"):
        raise UnsupportedModelError(f"{facts.name} has the rotary scaling {kind!r}, which is not supported.")


def read_embedding_settings(architecture: Architecture, facts: GGUFFacts) -> dict[str, Any] | None:
    """The `embedding` entry of metadata.json for an encoder, or for a decoder that states its pooling."""
    kind = facts.fields.get("pooling_type", 1 if architecture.model_type == "bert" else None)
    if kind is None:
        return None
    if kind not in POOLING_TYPES:
        raise UnsupportedModelError(f"{facts.name} has the pooling type {kind!r}, which is not supported.")
    pooling, settings = {"pooling_mode": POOLING_TYPES[kind]}, {"max_seq_length": facts.fields.get("context_length")}
    # GGUF does not say whether vectors are normalised. Programs that read it always normalise them.
    return make_embedding(Path(facts.name), pooling, settings, {}, normalize=True)


def open_gguf(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelSource:
    """The source of a GGUF file that `read_gguf` has read."""
    kind = fields.get("general.architecture")
    architecture = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        hint = f"Supported in GGUF: {', '.join(ARCHITECTURES)}. docs/add-a-model.md shows how an architecture is added."
        raise UnsupportedModelError(f"{path} has the architecture {kind!r}, which is not supported.", hint=hint)
    if fields.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(f"{path} is one part of several.", hint="Merge them first with llama-gguf-split.")
    constants = {name: tensors[name] for name in CONFIG_TENSORS if name in tensors}
    for name, tensor in constants.items():
        if tensor.tensor_type.name != "F32":
            raise UnsupportedModelError(f"{path}: {name!r} is not of type F32.")
    facts = GGUFFacts(
        name=str(path),
        fields={name.removeprefix(f"{kind}."): value for name, value in fields.items()},
        shapes={name: tuple(reversed(tensor.shape.tolist())) for name, tensor in tensors.items()},
        constants={name: tensor.data.tolist() for name, tensor in constants.items()},
    )
    config = make_config(architecture, facts)
    weights = [tensor for name, tensor in tensors.items() if name not in CONFIG_TENSORS]
    tokenizer_files = make_tokenizer_files(str(path), facts.fields, config)
    stated = {target: fields.get(f"general.sampling.{key}") for key, target in SAMPLING_KEYS.items()}
    return ModelSource(
        kind="gguf",
        path=path,
        files=(path,),
        config=config,
        tensors=tuple(make_tensor(path, architecture, config, tensor) for tensor in weights),
        write_tokenizer=functools.partial(write_files, tokenizer_files),
        embedding=read_embedding_settings(architecture, facts),
        generation_config={name: value for name, value in stated.items() if value is not None} or None,
    )


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata fields as plain values, and the reader's tensors by name, all of which lie inside the file."""
    import gguf

    class Reader(gguf.GGUFReader):
        """A reader that takes an array in one piece and strings as slices: the package makes five arrays of every item,
        which takes seconds for a vocabulary."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            view, start = self.data.data, orig_offs + 12
            parts: list[Any] = []
            item, num_items = struct.unpack_from("=IQ", view, orig_offs)
            if item in self.gguf_scalar_to_np:
                parts = [self._get(start, self.gguf_scalar_to_np[item], num_items)]
                if len(parts[0]) < num_items:
                    raise ValueError(f"an array of {num_items} items does not end")
                start += parts[0].nbytes
            elif item == gguf.GGUFValueType.STRING:
                for _ in range(num_items):
                    num_bytes = struct.unpack_from("=Q", view, start)[0]
                    parts.append(view[start + 8 : start + 8 + num_bytes])
                    start += 8 + num_bytes
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            return (
                start - orig_offs,
                parts,
                list(range(len(parts))),
                [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(item)],
            )

    file_bytes, fields = path.stat().st_size, {}
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CorruptFileError(f"{path} is not a GGUF file.")
    try:
        reader = Reader(path)
        for name, field in reader.fields.items():
            is_float32 = field.types[:1] == [gguf.GGUFValueType.FLOAT32]
            # The shortest decimal: 1e-05, not the 9.999999747378752e-06 that its float32 is.
            fields[name] = float(str(field.parts[-1][0])) if is_float32 else field.contents()
    except (
        Exception
    ) as error:  # the reader has no checks of its own, so any error in it most often means a damaged file
        why = f"its {file_bytes:,} bytes are no whole GGUF file ({first_line(error)})"
        raise CorruptFileError(f"{path} is cut off or altered: {why}.") from error
    for tensor in reader.tensors:
        end = int(tensor.data_offset) + int(tensor.n_bytes)
        if end > file_bytes or tensor.data.nbytes != int(tensor.n_bytes):
            raise CorruptFileError(f"{path} is cut off: {tensor.name!r} ends at byte {end}, the file at {file_bytes}.")
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def make_tensor(path: Path, architecture: Architecture, config: Mapping[str, Any], tensor: Any) -> SourceTensor:
    """A tensor of a known architecture under its Hugging Face name and in that layout."""
    block = BLOCK_NUMBER.match(tensor.name)
    stem, _, suffix = BLOCK_NUMBER.sub("blk.#.", tensor.name).rpartition(".")
    target = architecture.tensors.get(stem)
    if target is None or suffix not in ("weight", "bias"):
        message = f"{path}: the tensor {tensor.name!r} is not known for the architecture {architecture.model_type!r}."
        raise UnsupportedModelError(message)
    name = f"{target.replace('#', block[1]) if block else target}.{suffix}".replace(".sinks.weight", ".sinks")
    order = row_order(path, config, name, int(tensor.shape[-1])) if architecture.permuted else None
    return read_tensor(path, tensor, name, order, minus_one=architecture.norm_plus_one and name.endswith("norm.weight"))


def row_order(path: Path, config: Mapping[str, Any], name: str, num_rows: int) -> npt.NDArray[np.int64] | None:
    """Which row of the GGUF tensor each row of the Hugging Face tensor is; None when they are the same.

    GGUF keeps llama's rotary pairs side by side, Hugging Face keeps all first halves before all second halves.
    """
    found = re.search(r"\.([qk])_proj\.", name)
    if found is None:
        return None
    num_heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
    if num_rows % (2 * num_heads):
        raise CorruptFileError(f"{path}: {name!r} has {num_rows} rows for {num_heads} heads.")
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def read_tensor(
    path: Path, tensor: Any, name: str, order: npt.NDArray[np.int64] | None = None, *, minus_one: bool = False
) -> SourceTensor:
    """A tensor of a GGUF file, with its rows in another order, or less one, if asked for."""
    import gguf

    kind, shape = tensor.tensor_type.name, tensor.shape.tolist()[::-1]
    if name.endswith("shared_expert_gate.weight"):  # a vector in GGUF
        shape = [1, *shape[-1:]]
    info = source_info(path, name, "float32" if minus_one else DTYPE_CODES.get(kind, "float32"), shape)
    info = info._replace(quantization=None if minus_one else make_quantization(kind, len(shape) - 1))
    if info.quantization is None and kind not in DTYPE_CODES:
        zeros = np.zeros((1, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]), np.uint8)
        try:
            gguf.quants.dequantize(zeros, tensor.tensor_type)
        except NotImplementedError:
            hint = "Take a file with other types, such as Q4_0, Q8_0, Q4_K_M, Q6_K, F16 or BF16."
            raise UnsupportedModelError(
                f"{path}: {name!r} has the GGUF type {kind}, which is not read.", hint=hint
            ) from None

    def load_blocks() -> Row:
        return split_blocks(info, tensor.data if order is None else tensor.data[order])

    def load() -> npt.NDArray[Any]:
        if info.quantization is not None:
            return dequantize(load_blocks())
        values = np.asarray(tensor.data)
        if kind in DTYPE_CODES:
            values = values.view(numpy_type(DTYPE_CODES[kind])).reshape(info.shape)
        else:
            values = gguf.quants.dequantize(values, tensor.tensor_type).reshape(info.shape)
        if order is not None:
            values = values[order]
        return widened(values) - np.float32(1) if minus_one else values

    return SourceTensor(info, load, None if info.quantization is None else load_blocks)
