"""Small GGUF files, one per architecture, written with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from archerfish.store.format import INTEGER_BYTES, SUPER_GROUP_SIZE, SUPER_SCALES

WIDTH = 64
HEADS = 4
KV_HEADS = 2
FFN = 96
NUM_LAYERS = 2
EXPERTS, EXPERT_FFN = 5, 32
HEAD_DIM = WIDTH // HEADS
BYTES = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
WORDS = ["Ġh", "el", "lo", "Ġhel", "Ġhello", "12", "hi"]
MERGES = ["Ġ h", "e l", "l o", "Ġh el", "Ġhel lo", "1 2", "h i"]
Array = npt.NDArray[np.float32]


def byte_level_tokens() -> list[str]:
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, *WORDS]


NUM_TOKENS = len(byte_level_tokens())


def layer_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    kv_width = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,),
        "attn_output.weight": (WIDTH, WIDTH),
        "ffn_norm.weight": (WIDTH,),
        "ffn_up.weight": (FFN, WIDTH),
        "ffn_down.weight": (WIDTH, FFN),
    }
    if architecture == "phi3":
        shapes["attn_qkv.weight"] = (WIDTH + 2 * kv_width, WIDTH)
        shapes["ffn_up.weight"] = (2 * FFN, WIDTH)
    else:
        shapes |= {
            "attn_q.weight": (WIDTH, WIDTH),
            "attn_k.weight": (kv_width, WIDTH),
            "attn_v.weight": (kv_width, WIDTH),
        }
        shapes["ffn_gate.weight"] = (FFN, WIDTH)
    if architecture.startswith("qwen2"):
        shapes |= {"attn_q.bias": (WIDTH,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}
    if architecture.endswith("moe"):
        del shapes["ffn_up.weight"], shapes["ffn_down.weight"], shapes["ffn_gate.weight"]
        hidden = FFN if architecture == "olmoe" else EXPERT_FFN
        shapes |= {"ffn_gate_inp.weight": (EXPERTS, WIDTH), "ffn_down_exps.weight": (EXPERTS, WIDTH, hidden)}
        shapes |= dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), (EXPERTS, hidden, WIDTH))
    if architecture == "qwen2moe":
        shapes |= {"ffn_gate_inp_shexp.weight": (WIDTH,), "ffn_down_shexp.weight": (WIDTH, FFN)}
        shapes |= dict.fromkeys(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), (FFN, WIDTH))
    if architecture.startswith("gemma"):
        shapes |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        shapes |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if architecture == "olmoe":
        shapes |= {"attn_q_norm.weight": (WIDTH,), "attn_k_norm.weight": (kv_width,)}
    return shapes


def bert_layer_shapes() -> dict[str, tuple[int, ...]]:
    square = ("attn_q", "attn_k", "attn_v", "attn_output")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (WIDTH, WIDTH) for name in square}
    shapes |= {f"{name}.bias": (WIDTH,) for name in (*square, "ffn_down", "attn_output_norm", "layer_output_norm")}
    shapes |= {f"{name}.weight": (WIDTH,) for name in ("attn_output_norm", "layer_output_norm")}
    return shapes | {"ffn_up.weight": (FFN, WIDTH), "ffn_up.bias": (FFN,), "ffn_down.weight": (WIDTH, FFN)}


def make_tensors(architecture: str, *, num_tokens: int = NUM_TOKENS, seed: int = 0) -> dict[str, Array]:
    """Tensors under their GGUF names."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (num_tokens, WIDTH)}
    if architecture == "bert":
        shapes |= {"token_types.weight": (2, WIDTH), "position_embd.weight": (32, WIDTH)}
        shapes |= {"token_embd_norm.weight": (WIDTH,), "token_embd_norm.bias": (WIDTH,)}
    else:
        shapes["output_norm.weight"] = (WIDTH,)
    if architecture in ("qwen3", "qwen2moe", "qwen3moe", "phi3"):
        shapes["output.weight"] = (num_tokens, WIDTH)
    per_layer = bert_layer_shapes() if architecture == "bert" else layer_shapes(architecture)
    for layer in range(NUM_LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in per_layer.items()}
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def add_byte_level_tokenizer(writer: Any, pre: str = "smollm") -> None:
    tokens = byte_level_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def write_gguf(
    path: Path,
    architecture: str,
    tensors: dict[str, Array],
    quant_type: str = "F32",
    *,
    tokenizer: Any = add_byte_level_tokenizer,
    extra: dict[str, float | int | str] | None = None,
) -> Path:
    """Write tensors; matrices in `quant_type`, the others as F32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    if architecture == "bert":
        writer.add_layer_norm_eps(1e-12)
    else:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(100000.0)
    if architecture.startswith("gemma") or architecture.startswith("qwen3"):
        writer.add_key_length(HEAD_DIM)
    if architecture.endswith("moe"):
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        if architecture != "olmoe":  # whose files have the length of experts as that of feed-forwards
            writer.add_expert_feed_forward_length(EXPERT_FFN)
        writer.add_expert_shared_feed_forward_length(FFN)
    adders: dict[type, Any] = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
    for key, value in (extra or {}).items():
        adders[type(value)](key, value)
    if tokenizer is not None:
        tokenizer(writer)
    kind = gguf.GGMLQuantizationType[quant_type]
    for name, array in tensors.items():
        if array.ndim > 1 and quant_type != "F32":
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    return finish(writer, path)


# What llama.cpp's converter does to tensors and settings of a family.
PERMUTED = ("mistral3", "smollm3", "granite")  # rows of queries and keys
LAYER_NORMS = ("command-r", "cohere2", "starcoder2", "gpt2")
SETTINGS = {
    "logit_scale": "add_logit_scale",
    "logits_scaling": "add_logit_scale",
    "attention_multiplier": "add_attention_scale",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
}


def write_family(path: Path, architecture: str, model: Any, config: dict[str, Any]) -> Path:
    """A model of transformers as llama.cpp's converter writes it, without a tokenizer."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    writer = gguf.GGUFWriter(path, architecture)
    add_settings(writer, architecture, config)
    if architecture == "gpt-oss":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_rope_scaling_yarn_beta_fast(config["rope_parameters"]["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(config["rope_parameters"]["beta_slow"])
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    given = type(model).state_dict(model)
    for name, tensor in (split_experts(given) if architecture == "gpt-oss" else given).items():
        if name != "lm_head.weight" or not config.get("tie_word_embeddings", True):
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, name
            writer.add_tensor(target, np.ascontiguousarray(as_converted(architecture, config, name, tensor.numpy())))
    return finish(writer, path)


def split_experts(weights: dict[str, Any]) -> dict[str, Any]:
    """The stacks of gpt-oss with (outputs, inputs), gates apart from the others."""
    found: dict[str, Any] = {}
    for name, tensor in weights.items():
        scope, _, which = name.rpartition(".")
        if which == "sinks":
            found[f"{name}.weight"] = tensor
        elif not scope.endswith(".experts"):
            found[name] = tensor
        else:
            end, turned = (".bias", tensor) if which.endswith("_bias") else (".weight", tensor.mT)
            parts = (
                {"down_proj": turned} if "down" in which else {"gate_proj": turned[:, ::2], "up_proj": turned[:, 1::2]}
            )
            found |= {f"{scope}.{part}{end}": each for part, each in parts.items()}
    return found


def add_settings(writer: Any, architecture: str, config: dict[str, Any]) -> None:
    heads, rope = config["num_attention_heads"], config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if architecture != "gpt2":
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_rope_freq_base(rope["rope_theta"])
    if architecture not in ("granite", "gpt2", "starcoder2"):
        writer.add_key_length(head_dim)
    if architecture in LAYER_NORMS:
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, method in SETTINGS.items():
        if name in config:
            getattr(writer, method)(config[name])
    if architecture == "glm4":
        writer.add_rope_dimension_count(head_dim // 2)
    if config.get("sliding_window") and architecture in ("olmo2", "exaone4", "cohere2", "gpt-oss"):
        writer.add_sliding_window(config["sliding_window"])
        if architecture not in ("cohere2", "gpt-oss"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("llama_4_scaling_beta"):
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def as_converted(architecture: str, config: dict[str, Any], name: str, array: Array) -> Array:
    """A tensor of transformers in the order in which GGUF has it."""
    if architecture == "gpt2" and array.ndim == 2 and ".h." in name:
        return array.T
    if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
        num = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return array.reshape(num, 2, len(array) // num // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array + 1 if architecture == "gemma" and name.endswith("norm.weight") else array


def random_blocks(quant_type: str, num_rows: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Blocks of a K type with any codes and small scales."""
    random, num_blocks = np.random.default_rng(seed), num_rows * width // SUPER_GROUP_SIZE
    blocks = random.integers(0, 256, (num_blocks, INTEGER_BYTES[quant_type]), dtype=np.uint8)
    place = SUPER_SCALES[quant_type]
    scales = random.uniform(-0.01, 0.01, (num_blocks, (place.stop - place.start) // 2))
    blocks[:, place] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(num_rows, -1)


def write_blocks(path: Path, quant_type: str, blocks: dict[str, npt.NDArray[np.uint8]], width: int) -> Path:
    """A llama of one layer without a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(4)
    writer.add_head_count(4)
    for name, array in blocks.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[quant_type])
    return finish(writer, path)


def finish(writer: Any, path: Path) -> Path:
    """Write the file of a GGUFWriter."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
