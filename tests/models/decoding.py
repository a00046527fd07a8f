"""Tiny random decoders of transformers, and a driver that runs ours over shuffled blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

from archerfish.kernels.formats import PLAIN, WeightFormat
from archerfish.kernels.torch.reference import TorchOps
from archerfish.layers.weights import Weights
from archerfish.models.adapter import KVShape, model_class
from archerfish.models.config import Config
from archerfish.runtime.batch import build_batch
from archerfish.store.format import TensorInfo
from archerfish.store.source import SourceTensor
from archerfish.store.text_parts import text_model
from tests.models.recurring import StepDriver

LENGTH = 60  # of every test sequence: the base of dynamic rotary embeddings depends on it
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_theta": 10000.0,
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 5 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
ALTERNATING = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
FULL_SLIDING = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
COHERE = {name: value for name, value in SIZES.items() if name != "rms_norm_eps"}
GEMMA = {**SIZES, "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 11, "num_hidden_layers": 4}

EXPERTS = {**SIZES, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}


def llama(**rope: Any) -> tuple[str, dict[str, Any]]:
    return "Llama", {**SIZES, "rope_parameters": {"rope_theta": 1000.0, **rope}}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": llama(),
    "llama-tied": ("Llama", {**SIZES, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-multi-head": ("Llama", {**SIZES, "num_key_value_heads": 4, "hidden_act": "gelu"}),
    "llama-one-kv-head": ("Llama", {**SIZES, "num_key_value_heads": 1}),
    "llama-linear": llama(rope_type="linear", factor=3.0),
    "llama-dynamic": ("Llama", {**llama(rope_type="dynamic", factor=2.0)[1], "max_position_embeddings": 32}),
    "llama-llama3": llama(**LLAMA3),
    "llama-yarn": llama(**YARN),
    "llama-yarn-mscale": llama(**YARN, mscale=0.7, mscale_all_dim=0.4, beta_fast=8.0, beta_slow=2.0, truncate=False),
    "llama-yarn-factor": llama(**YARN, attention_factor=1.3),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 32}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": None}),
    "mistral-window": ("Mistral", {**SIZES, "sliding_window": 7}),
    "mistral-window-1": ("Mistral", {**SIZES, "sliding_window": 1}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2-uncapped": ("Gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", {**GEMMA, "num_hidden_layers": 7}),
    "gemma3-scaled": ("Gemma3", {**GEMMA, **ALTERNATING}),
    "phi3": ("Phi3", {**SIZES, "sliding_window": 13}),
    "phi3-partial": ("Phi3", {**SIZES, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "gemma": ("Gemma", {**SIZES, "head_dim": 24}),
    "smollm3": ("SmolLM3", {**SIZES, "num_hidden_layers": 4}),
    "smollm3-window": ("SmolLM3", {
        **SIZES, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 9, "tie_word_embeddings": False,
    }),
    "ministral": ("Ministral", {**SIZES, "head_dim": 24, "sliding_window": 9, **FULL_SLIDING}),
    "ministral3": ("Ministral3", {**SIZES, "head_dim": 24, "max_position_embeddings": 256, "rope_parameters": {
        **YARN, "rope_theta": 1e4, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }}),
    "granite": ("Granite", {
        **SIZES, "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.15, "logits_scaling": 7.0,
    }),
    "granite-tied": ("Granite", {**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "glm": ("Glm", {**SIZES, "head_dim": 24, "attention_bias": True}),
    "glm4": ("Glm4", {**SIZES, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {**SIZES, "num_attention_heads": 8}),
    "olmo3": ("Olmo3", {**SIZES, "num_hidden_layers": 5, "sliding_window": 9}),
    "olmo3-yarn": ("Olmo3", {**SIZES, "sliding_window": 9, "num_key_value_heads": 4, **FULL_SLIDING, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}, "full_attention": {**YARN, "rope_theta": 5e5},
    }}),
    "exaone4": ("Exaone4", {**SIZES, "num_hidden_layers": 4, "sliding_window": 9, "sliding_window_pattern": 4}),
    "exaone4-full": ("Exaone4", {
        **SIZES, "sliding_window": None, "tie_word_embeddings": True, "layer_types": ["full_attention"] * 3,
    }),
    "cohere": ("Cohere", {**COHERE, "logit_scale": 0.3, "attention_bias": True}),
    "cohere-plain": ("Cohere", COHERE),
    "cohere-untied": ("Cohere", {**COHERE, "tie_word_embeddings": False}),
    "cohere2": ("Cohere2", {**COHERE, "num_hidden_layers": 5, "sliding_window": 9}),
    "starcoder2": ("Starcoder2", {**COHERE, "sliding_window": 9}),
    "starcoder2-plain": ("Starcoder2", {**COHERE, "use_bias": False, "tie_word_embeddings": False}),
    "gpt2": ("GPT2", {
        "vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 2, "eos_token_id": 1,
    }),
    "phi4-mini": ("Phi3", {
        **SIZES, "rope_parameters": {**LONGROPE, **{name: [1.5] * 4 for name in ("short_factor", "long_factor")},
        "partial_rotary_factor": 0.5}, "original_max_position_embeddings": 64, "tie_word_embeddings": True,
    }),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmoe": ("Olmoe", {**SIZES, "num_experts": 8, "num_experts_per_tok": 3}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 2}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 5, "sliding_window": 7}),
    "gpt-oss": ("GptOss", {
        **SIZES, "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "num_hidden_layers": 4,
        "rope_parameters": {**YARN, "rope_theta": 150000.0, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    }),
    "phi3-longrope": ("Phi3", {**SIZES, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
}  # fmt: skip


@cache
def make(kind: str) -> tuple[Any, dict[str, Any]]:
    """A random transformers model of a kind, and its config.json."""
    family, sizes = KINDS[kind]
    return make_model(family, sizes)


def make_model(family: str, sizes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(1)
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation="eager")
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():  # the default initialisation is too small to show a wrong formula
        torch.nn.init.normal_(parameter, std=5.0 if name.endswith(("sinks", "gate_up_proj_bias")) else 0.2)
    values = config.to_dict()
    if family in ("GPT2", "GptOss"):  # whose tensors get other names and layouts when they are read
        tensors = [
            SourceTensor(TensorInfo(n, "float32", tuple(t.shape)), t.numpy) for n, t in model.state_dict().items()
        ]
        values, found = text_model(values, tensors)
        weights = {tensor.info.name: torch.from_numpy(tensor.load()) for tensor in found}
        model.state_dict = lambda: weights
    return model, values


def random_tokens(num: int, vocab_size: int = 97) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, vocab_size, (num, LENGTH)).tolist()  # type: ignore[no-any-return]


def their_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


class Driver(StepDriver):
    """A model of ours with KV memory, whose sequences own blocks in a shuffled order."""

    def __init__(
        self,
        ops: TorchOps,
        weights: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        tokens: Sequence[Sequence[int]],
        *,
        block_size: int = 16,
        max_len: int = LENGTH,
        is_deterministic: bool = False,
        weight_format: WeightFormat = PLAIN,
    ) -> None:
        self.ops = ops
        self.block_size = block_size
        self.is_deterministic = is_deterministic
        self.tokens = [list(t) for t in tokens]
        values = Config(config)
        architecture = model_class(values)
        self.model = architecture(Weights(weights, ops, weight_format=weight_format), values, max_len)
        shape = architecture.memory_shape(values, ops.ranks)
        assert isinstance(shape, KVShape)
        per_sequence = -(-max_len // block_size)
        num_blocks = per_sequence * len(tokens) + 3
        sizes = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        self.layers = [ops.new_kv_layer(*sizes) for _ in range(shape.num_layers)]
        for layer in self.layers:  # the contents of unwritten memory must not matter; four bytes of -1 are NaN
            for memory in (layer.keys, layer.values):
                memory.fill_(float("nan") if memory.is_floating_point() else -1)
        order = np.random.default_rng(5).permutation(num_blocks)[: per_sequence * len(tokens)].tolist()
        self.blocks: list[list[int]] = [order[i :: len(tokens)] for i in range(len(tokens))]
        self.num_computed = [0] * len(tokens)

    def build(self, **inputs: Any) -> Any:
        return build_batch(self.ops, is_deterministic=self.is_deterministic, **inputs)

    def blocks_of(self, sequence: int) -> list[int]:
        return self.blocks[sequence][: -(-self.num_computed[sequence] // self.block_size)]

    def greedy(self, num_tokens: int) -> list[list[int]]:
        """Prefill what is given, then decode all sequences together."""
        work = sorted(
            ((i, len(t) - self.num_computed[i]) for i, t in enumerate(self.tokens)), key=lambda item: item[1] != 1
        )
        added: list[list[int]] = [[] for _ in self.tokens]
        for _ in range(num_tokens):
            for (i, _), logits in zip(work, self.step(work), strict=True):
                added[i].append(int(logits[-1].argmax()))
                self.tokens[i].append(added[i][-1])
            work = [(i, 1) for i in range(len(self.tokens))]
        return added
