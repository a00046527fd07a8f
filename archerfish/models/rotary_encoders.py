"""Encoders with rotary positions: ModernBERT, Nomic BERT, GTE and Jina v3."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from archerfish.errors import UnsupportedModelError
from archerfish.kernels.batches import T
from archerfish.kernels.ops import Pooling, Rotary
from archerfish.layers.encoder import BlockNames, BlockShape, ClassifierHead, EncoderBlock, PreNormBlock
from archerfish.layers.rotary import RotaryConfig, read_rotary, rotary_table
from archerfish.layers.weights import Weights
from archerfish.models.adapter import Encoder, TokenBatch
from archerfish.models.config import Config


class RotaryEncoder(Encoder[T]):
    """Blocks as BERT's, with rotary positions and mostly a gated feed-forward.

    Checkpoints have the names of transformers, or those of the models' own code, which are called own here.
    """

    is_recordable = True
    names: ClassVar[BlockNames] = BlockNames(
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        attention_out="self_attn.o_proj",
        attention_norm="post_attention_layernorm",
        up="mlp.up_proj",
        down="mlp.down_proj",
        output_norm="post_mlp_layernorm",
        gate="mlp.gate_proj",
    )
    own_names: ClassVar[BlockNames]
    own_layers: ClassVar[str] = "encoder.layers"
    own_norm: ClassVar[str] = "emb_ln"  # of the embeddings
    theta: ClassVar[float] = 10_000.0  # where the configuration does not say
    head_parts: ClassVar[tuple[str, str]] = ("pooler.dense", "classifier")  # the first below the prefix

    def __init__(self, weights: Weights[T], config: Config) -> None:
        config = self.read(config)
        super().__init__(weights, config)
        shape, num_types = self.shape, config.integer("type_vocab_size", 0)
        is_own = weights.has(f"{self.own_layers}.0.{self.own_names.down}.weight")
        names, layers = (self.own_names, self.own_layers) if is_own else (self.names, "layers")
        self.words = weights.table("embeddings.word_embeddings.weight", config.integer("vocab_size"), shape.width)
        self.needs_types = num_types > 0
        if self.needs_types:
            self.types = weights.table("embeddings.token_type_embeddings.weight", num_types, shape.width)
        norm = self.own_norm if is_own else "embeddings.LayerNorm"
        self.norm = weights.layer_norm(norm, shape.width, shape.eps)
        rotary = rotary_of(weights, shape, read_rotary(config.values, theta=self.theta))
        numbers = range(config.integer("num_hidden_layers"))
        self.blocks = [EncoderBlock(weights.scope(f"{layers}.{i}"), shape, names, rotary) for i in numbers]

    def forward(self, batch: TokenBatch) -> T:
        ops = self.ops
        tables, ids = [self.words], [ops.tensor(batch.token_ids)]
        if self.needs_types:
            types = np.zeros_like(batch.token_ids) if batch.type_ids is None else batch.type_ids
            tables, ids = [self.words, self.types], [*ids, ops.tensor(types)]
        x, bias = ops.layer_norm(ops.embed(tables, ids), self.norm), self.attention_bias(batch)
        for block in self.blocks:
            x = block(x, batch.segments, bias)
        return x

    @classmethod
    def read(cls, config: Config) -> Config:
        """The configuration with the names of transformers."""
        return config

    @classmethod
    def block_shape(cls, config: Config) -> BlockShape:
        return super().block_shape(cls.read(config))

    @classmethod
    def max_positions(cls, config: Config) -> int:
        return super().max_positions(cls.read(config))

    @classmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        dense, out = cls.head_parts
        width = cls.width(config)
        return ClassifierHead(weights, f"{cls.prefix}.{dense}", out, width, config.num_labels, "tanh")


def rotary_of(weights: Weights[T], shape: BlockShape, config: RotaryConfig) -> Rotary[T]:
    return weights.ops.rotary(*rotary_table(config, shape.width // shape.num_heads, config.max_positions))


def refuse(config: Config, usual: dict[str, object]) -> None:
    """Refuse settings of a model's own code whose meaning is not built here."""
    for name, value in usual.items():
        if config.values.get(name, value) not in (value, None):
            message = (
                f"{config.model_type} with {name} = {config.values[name]!r} is not supported, only with {value!r}."
            )
            raise UnsupportedModelError(message, hint="docs/embed.md lists the models that are.")


class NomicEncoder(RotaryEncoder[T]):
    """nomic-embed-text 1 and 1.5."""

    prefix = "nomic_bert"
    own_names = BlockNames(
        query="attn.Wqkv",
        key="attn.Wqkv",
        value="attn.Wqkv",
        attention_out="attn.out_proj",
        attention_norm="norm1",
        up="mlp.fc11",
        down="mlp.fc2",
        output_norm="norm2",
        gate="mlp.fc12",
    )
    theta = 1000.0
    own_settings: ClassVar[dict[str, str]] = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    }

    @classmethod
    def read(cls, config: Config) -> Config:
        if "n_embd" not in config.values:
            return config
        refuse(
            config,
            {
                "activation_function": "swiglu",
                "prenorm": False,
                "use_rms_norm": False,
                "rotary_emb_fraction": 1.0,
                "rotary_emb_interleaved": False,
                "rotary_scaling_factor": None,
                "rotary_emb_scale_base": None,
                "parallel_block": False,
                "num_experts": 0,
            },
        )
        renamed = {
            new: config.values[old] for old, new in cls.own_settings.items() if config.values.get(old) is not None
        }
        return Config({**config.values, **renamed, "hidden_act": "silu"})


class GteEncoder(RotaryEncoder[T]):
    """gte-multilingual, gte-base-en-v1.5 and gte-large-en-v1.5, as transformers writes them."""

    prefix = "gte"
    own_names = BlockNames(
        query="attention.qkv_proj",
        key="attention.qkv_proj",
        value="attention.qkv_proj",
        attention_out="attention.o_proj",
        attention_norm="attn_ln",
        up="mlp.up_gate_proj",
        down="mlp.down_proj",
        output_norm="mlp_ln",
        gate="mlp.up_gate_proj",
        is_up_first=True,
    )
    own_layers = "encoder.layer"
    own_norm = "embeddings.LayerNorm"
    theta = 160_000.0
    masked_parts = ("lm_head.dense", "lm_head.norm", "lm_head.decoder", "lm_head.decoder.bias")


class NewEncoder(GteEncoder[T]):
    """The same with the names of their own code."""

    prefix = "new"

    @classmethod
    def read(cls, config: Config) -> Config:
        refuse(
            config,
            {
                "position_embedding_type": "rope",
                "pack_qkv": True,
                "logn_attention_scale": False,
                "layer_norm_type": "layer_norm",
            },
        )
        return config


class JinaEncoder(RotaryEncoder[T]):
    """Jina v3 as transformers writes it, without the adapters of its tasks."""

    prefix = "roberta"
    names = RotaryEncoder.names._replace(up="mlp.fc1", down="mlp.fc2", gate="")
    own_names = BlockNames(
        query="mixer.Wqkv",
        key="mixer.Wqkv",
        value="mixer.Wqkv",
        attention_out="mixer.out_proj",
        attention_norm="norm1",
        up="mlp.fc1",
        down="mlp.fc2",
        output_norm="norm2",
    )
    theta = 20_000.0

    @classmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        return ClassifierHead(
            weights, "classifier.dense", "classifier.out_proj", cls.width(config), config.num_labels, "tanh"
        )


class ModernBertEncoder(Encoder[T]):
    """Norms in front, a window to both sides in most layers, and no biases."""

    prefix = "model"
    is_recordable = True
    shape_names = ("hidden_size", "num_attention_heads", "intermediate_size", "hidden_activation")
    names: ClassVar[BlockNames] = BlockNames(
        query="attn.Wqkv",
        key="attn.Wqkv",
        value="attn.Wqkv",
        attention_out="attn.Wo",
        attention_norm="attn_norm",
        up="mlp.Wi",
        down="mlp.Wo",
        output_norm="mlp_norm",
        gate="mlp.Wi",
    )
    masked_parts = ("head.dense", "head.norm", "decoder", "decoder.bias")
    table_name = "embeddings.tok_embeddings"
    thetas: ClassVar[dict[str, tuple[str, float]]] = {
        "full_attention": ("global_rope_theta", 160_000.0),
        "sliding_attention": ("local_rope_theta", 10_000.0),
    }

    def __init__(self, weights: Weights[T], config: Config) -> None:
        super().__init__(weights, config)
        shape = self.shape
        self.words = weights.table("embeddings.tok_embeddings.weight", config.integer("vocab_size"), shape.width)
        self.norm = weights.layer_norm("embeddings.norm", shape.width, shape.eps, has_bias=shape.has_norm_bias)
        self.final_norm = weights.layer_norm("final_norm", shape.width, shape.eps, has_bias=shape.has_norm_bias)
        rotaries = {kind: rotary_of(weights, shape, self.rotary_config(config, kind)) for kind in self.thetas}
        self.blocks: list[PreNormBlock[T]] = []
        for i, kind in enumerate(self.layer_types(config)):
            window = self.most_expanded(config) if kind == "sliding_attention" else 0
            scope = weights.scope(f"layers.{i}")
            self.blocks.append(PreNormBlock(scope, shape, self.names, rotaries[kind], window, is_first=i == 0))

    def forward(self, batch: TokenBatch) -> T:
        ops, bias = self.ops, self.attention_bias(batch)
        x = ops.layer_norm(ops.embed((self.words,), (ops.tensor(batch.token_ids),)), self.norm)
        for block in self.blocks:
            x = block(x, batch.segments, bias)
        return ops.layer_norm(x, self.final_norm)

    @classmethod
    def most_expanded(cls, config: Config) -> int:
        """The window to each side: within it all tokens attend to the first one."""
        return config.integer("local_attention", 128) // 2 + 1

    @classmethod
    def layer_types(cls, config: Config) -> list[str]:
        period = config.integer("global_attn_every_n_layers", 3)
        unstated = [
            "sliding_attention" if i % period else "full_attention" for i in range(config.integer("num_hidden_layers"))
        ]
        return unstated if config.values.get("layer_types") is None else config.layer_types()

    @classmethod
    def rotary_config(cls, config: Config, kind: str) -> RotaryConfig:
        name, theta = cls.thetas[kind]
        return read_rotary(config.values, kind, theta=config.number(name, theta))

    @classmethod
    def block_shape(cls, config: Config) -> BlockShape:
        shape, eps = super().block_shape(config), config.number("norm_eps", 1e-5)
        return shape._replace(eps=eps, has_norm_bias=config.flag("norm_bias"))

    @classmethod
    def head(cls, weights: Weights[T], config: Config) -> ClassifierHead[T]:
        shape = cls.block_shape(config)
        norm = weights.layer_norm("head.norm", shape.width, shape.eps, has_bias=shape.has_norm_bias)
        pooling: Pooling = "mean" if config.values.get("classifier_pooling") == "mean" else "cls"
        activation = config.activation("classifier_activation")
        parts = "head.dense", "classifier", shape.width, config.num_labels, activation
        return ClassifierHead(weights, *parts, norm=norm, pooling=pooling)
