"""RWKV-7 in a form that can be trained: whole rows of text at once, in plain torch, with gradients.

Modules and parameters have the names of Hugging Face's files, which `archerfish/store/rwkv_source.py` reads; the
formulas are those of `archerfish/kernels/torch/wkv.py`. Parameters are float32, large products are done in
`compute_type`, and all that concerns states in the parameters' type again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor
MIXES = "rwkvag"
DECAY_SCALE = -0.6065306597126334  # -exp(-0.5)
HEAD_NORM_EPS = 64e-5
NORM_EPS = 1e-5
LEAST_BLOCK = 8  # a triangle no larger than this is inverted by powers


@dataclass(frozen=True)
class Shape:
    vocab_size: int
    num_layers: int = 6
    width: int = 256
    feed_forward: int = 1024
    head_dim: int = 64
    decay_rank: int = 32
    rate_rank: int = 32
    value_rank: int = 16
    gate_rank: int = 64
    chunk: int = 32  # tokens that the recurrence takes at once; the length of a row is a multiple of it

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["RWKV7ForCausalLM"],
            "model_type": "rwkv7",
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.num_layers,
            "head_dim": self.head_dim,
            "norm_eps": NORM_EPS,
            "decay_low_rank_dim": self.decay_rank,
            "a_low_rank_dim": self.rate_rank,
            "v_low_rank_dim": self.value_rank,
            "gate_low_rank_dim": self.gate_rank,
            "hidden_act": "sqrelu",
            "tie_word_embeddings": False,
        }


def invert_triangle(lower: Tensor) -> Tensor:
    """(1 + lower)^-1 of strictly lower triangles, by halves: powers of a large one would drown in roundings."""
    size = lower.shape[-1]
    eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
    if size <= LEAST_BLOCK:
        inverse, power = eye - lower, lower
        for _ in range((size - 1).bit_length() - 1):
            power = power @ power
            inverse = inverse + inverse @ power
        return inverse
    half = size // 2
    first, second = (invert_triangle(lower[..., part, part]) for part in (slice(half), slice(half, None)))
    inverse = torch.zeros_like(lower)
    inverse[..., :half, :half], inverse[..., half:, half:] = first, second
    inverse[..., half:, :half] = -(second @ lower[..., half:, :half] @ first)
    return inverse


class UnitInverse(torch.autograd.Function):
    """`invert_triangle`, remembering nothing but its result."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        inverse = invert_triangle(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        turned: Tensor = ctx.saved_tensors[0].transpose(-1, -2)
        return -(turned @ grads[0] @ turned).tril(-1)


class StateScan(torch.autograd.Function):
    """The states in front of each chunk, from S_0 = 0 and S_(n+1) = S_n @ carry_n + gain_n; one product a chunk each
    way."""

    @staticmethod
    def forward(ctx: Any, carry: Tensor, gain: Tensor) -> Tensor:
        states = torch.empty_like(gain)
        states[:, 0] = 0.0
        for n in range(gain.shape[1] - 1):
            torch.baddbmm(gain[:, n], states[:, n], carry[:, n], out=states[:, n + 1])
        ctx.save_for_backward(carry, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        carry, states = ctx.saved_tensors
        after = torch.empty_like(
            states
        )  # gradients of the state behind each chunk; behind the last one nothing reads it
        after[:, -1] = 0.0
        for n in reversed(range(1, carry.shape[1])):
            torch.baddbmm(grads[0][:, n], after[:, n], carry[:, n].transpose(-1, -2), out=after[:, n - 1])
        return states.transpose(-1, -2) @ after, after


invert: Callable[[Tensor], Tensor] = UnitInverse.apply
scan_states: Callable[[Tensor, Tensor], Tensor] = StateScan.apply


@dataclass(frozen=True)
class Chunks:
    """Inputs of the recurrence by chunk, (rows, heads, chunks, chunk, head_dim), each grown or shrunk to the chunk's
    start."""

    receptance: Tensor
    removal: Tensor
    added: Tensor
    key: Tensor
    value: Tensor
    last: Tensor  # (rows, heads, chunks, 1, head_dim): the decay of a whole chunk


def run_recurrence(chunks: Chunks) -> Tensor:
    """y of all tokens, starting from empty states."""
    receptance = chunks.receptance
    removal = chunks.removal
    added = chunks.added
    key = chunks.key
    value = chunks.value
    among = (removal @ added.transpose(-1, -2)).tril(-1)
    from_keys = (removal @ key.transpose(-1, -2)).tril(-1)
    inverse = -invert(among)
    on_state, on_values = inverse @ removal, inverse @ (from_keys @ value)
    seen = (receptance @ added.transpose(-1, -2)).tril()
    seen_keys = (receptance @ key.transpose(-1, -2)).tril()
    eye = torch.eye(value.shape[-1], dtype=value.dtype, device=value.device)
    carry = (eye + on_state.transpose(-1, -2) @ added) * chunks.last
    gain = (on_values.transpose(-1, -2) @ added + value.transpose(-1, -2) @ key) * chunks.last
    states = scan_states(carry.flatten(0, 1), gain.flatten(0, 1)).view_as(gain)
    return (receptance + seen @ on_state) @ states.transpose(-1, -2) + seen @ on_values + seen_keys @ value


def shift(x: Tensor, norm: Tensor, bias: Tensor, factors: Tensor, compute_type: torch.dtype) -> tuple[Tensor, ...]:
    """Norm x, then for each of some factors: a token's plus (the one's before it - its own) * factor."""
    normed = functional.layer_norm(x, norm.shape, norm, bias, NORM_EPS)
    delta = functional.pad(normed, (0, 0, 1, -1)) - normed
    return tuple((normed + delta * factor).to(compute_type) for factor in factors.unbind(0))


def lay_chunks(x: Tensor, head_dim: int, chunk: int, wide: torch.dtype) -> Tensor:
    """(rows, length, width) as (rows, heads, chunks, chunk, head_dim), so that each product of chunks is one
    operation."""
    rows, length, width = x.shape
    laid = x.view(rows, length // chunk, chunk, width // head_dim, head_dim).permute(0, 3, 1, 2, 4)
    return laid.contiguous().to(wide)


def prepare(
    products: tuple[Tensor, ...],
    mixed: tuple[Tensor, Tensor] | None,
    vectors: tuple[Tensor, Tensor, Tensor],
    head_dim: int,
    chunk: int,
) -> tuple[Tensor, ...]:
    """The fields of `Chunks`, and what a token's own key adds to y for each part of its value.

    products: receptance, decay, key, value, rate; mixed: how much of the first layer's values goes in, and these.
    """
    wide = vectors[0].dtype
    receptance, decay, key, value, rate = (lay_chunks(each, head_dim, chunk, wide) for each in products)
    if mixed is not None:
        part, first_value = (lay_chunks(each, head_dim, chunk, wide) for each in mixed)
        value = value + (first_value - value) * part.sigmoid()
    k_k, k_a, r_k = (each.view(-1, 1, 1, head_dim) for each in vectors)
    rate = rate.sigmoid()
    removal = key * k_k
    removal = removal * removal.square().sum(-1, keepdim=True).clamp_min(1e-24).rsqrt()
    key = key * (1.0 + (rate - 1.0) * k_a)
    bonus = (receptance * key * r_k).sum(-1, keepdim=True)
    log_decay = DECAY_SCALE * decay.sigmoid()
    total = log_decay.cumsum(-2)
    shrunk, grown = total.exp(), (-total).exp()
    return (
        receptance * shrunk,
        removal * (total - log_decay).exp(),
        removal * rate * grown,
        key * grown,
        value,
        shrunk[..., -1:, :],
        bonus,
    )


def finish(y: Tensor, bonus: Tensor, value: Tensor, gate: Tensor, norm: Tensor, bias: Tensor) -> Tensor:
    """Norm each head of y, add the bonus, and gate it: (rows, length, width)."""
    head_dim = y.shape[-1]
    normed = functional.layer_norm(y, (head_dim,), eps=HEAD_NORM_EPS)
    normed = normed * norm.view(-1, 1, 1, head_dim) + bias.view(-1, 1, 1, head_dim) + bonus * value
    rows, heads, chunks, chunk, _ = y.shape
    return normed.permute(0, 2, 3, 1, 4).reshape(rows, chunks * chunk, heads * head_dim).to(gate.dtype) * gate


@dataclass
class Parts:
    """What is between the large products; `compiled` makes one kernel or two of each."""

    shift: Callable[..., tuple[Tensor, ...]] = shift
    prepare: Callable[..., tuple[Tensor, ...]] = prepare
    finish: Callable[..., Tensor] = finish

    @classmethod
    def compiled(cls) -> Parts:
        make: Callable[[Any], Any] = torch.compile(dynamic=False)
        return cls(make(shift), make(prepare), make(finish))


def linear(x: Tensor, module: nn.Module) -> Tensor:
    return functional.linear(x, cast(Tensor, module.weight).to(x.dtype))


class LowRank(nn.Module):
    def __init__(self, width: int, rank: int, activation: nn.Module, *, bias: bool = True) -> None:
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(width, rank, bias=False), activation, nn.Linear(rank, width, bias=bias))
        nn.init.zeros_(cast(Tensor, self.lora[0].weight))
        nn.init.orthogonal_(cast(Tensor, self.lora[2].weight), gain=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = linear(self.lora[1](linear(x, self.lora[0])), self.lora[2])
        bias = cast(Tensor | None, self.lora[2].bias)
        return x if bias is None else x.to(bias.dtype) + bias


def uniform_linear(inputs: int, outputs: int, scale: float) -> nn.Linear:
    module = nn.Linear(inputs, outputs, bias=False)
    bound = scale * inputs**-0.5
    nn.init.uniform_(module.weight, -bound, bound)
    return module


class TimeMix(nn.Module):
    """Starts as RWKV-7's authors start it: heads from slow to quick decay, tokens mixed more in earlier layers."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        depth, place = layer / max(1, shape.num_layers - 1), torch.arange(width) / width
        for mix, power in zip(MIXES, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
            self.register_parameter(f"x_{mix}", nn.Parameter(1.0 - place ** (power * (1.0 - layer / shape.num_layers))))
        self.k_k, self.k_a = nn.Parameter(torch.full((width,), 0.85)), nn.Parameter(torch.ones(width))
        self.r_k = nn.Parameter(torch.zeros(width // shape.head_dim, shape.head_dim))
        scales = (0.5, 0.05, 0.5, 0.0)
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (uniform_linear(width, width, scale) for scale in scales)
        self.w_lora = LowRank(width, shape.decay_rank, nn.Tanh())
        self.a_lora = LowRank(width, shape.rate_rank, nn.Identity())
        self.g_lora = LowRank(width, shape.gate_rank, nn.Sigmoid(), bias=False)
        self.v_lora = LowRank(width, shape.value_rank, nn.Identity()) if layer else None
        self.g_norm = nn.LayerNorm(width)
        with torch.no_grad():
            ramp = torch.arange(width) / (width - 1)
            cast(Tensor, self.w_lora.lora[2].bias).copy_(-6.5 + 5.0 * ramp ** (0.85 + depth**0.5))
            cast(Tensor, self.a_lora.lora[2].bias).zero_()
            if self.v_lora is not None:
                cast(Tensor, self.v_lora.lora[2].bias).fill_(1.0)
            self.g_norm.weight.fill_(((1 + layer) / shape.num_layers) ** 0.7)

    def forward(
        self, x: Tensor, norm: nn.LayerNorm, first_value: Tensor | None, parts: Parts, compute_type: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        factors = torch.stack([cast(Tensor, getattr(self, f"x_{mix}")) for mix in MIXES])
        r, w, k, v, a, g = parts.shift(x, norm.weight, norm.bias, factors, compute_type)
        value = linear(v, self.v_proj)
        products = (linear(r, self.r_proj), self.w_lora(w), linear(k, self.k_proj), value, self.a_lora(a))
        mixed = None if self.v_lora is None or first_value is None else (self.v_lora(v), first_value)
        vectors = (self.k_k, self.k_a, self.r_k.flatten())
        *fields, bonus = parts.prepare(products, mixed, vectors, self.shape.head_dim, self.shape.chunk)
        chunks = Chunks(*fields)
        y = run_recurrence(chunks)
        y = parts.finish(y, bonus, chunks.value, self.g_lora(g), self.g_norm.weight, self.g_norm.bias)
        return x + linear(y, self.o_proj), value if first_value is None else first_value


class ChannelMix(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        place = torch.arange(shape.width) / shape.width
        self.x_k = nn.Parameter(1.0 - place ** ((1.0 - layer / shape.num_layers) ** 4))
        self.key = uniform_linear(shape.width, shape.feed_forward, 0.5)
        self.value = uniform_linear(shape.feed_forward, shape.width, 0.0)

    def forward(self, x: Tensor, norm: nn.LayerNorm, parts: Parts, compute_type: torch.dtype) -> Tensor:
        (k,) = parts.shift(x, norm.weight, norm.bias, self.x_k.unsqueeze(0), compute_type)
        return x + linear(linear(k, self.key).relu().square(), self.value)


class Block(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        if layer == 0:
            self.pre_norm = nn.LayerNorm(shape.width, NORM_EPS)
        self.attn_norm, self.ffn_norm = nn.LayerNorm(shape.width, NORM_EPS), nn.LayerNorm(shape.width, NORM_EPS)
        self.attn, self.ffn = TimeMix(shape, layer), ChannelMix(shape, layer)


class Rwkv7(nn.Module):
    def __init__(self, shape: Shape, compute_type: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.compute_type = compute_type
        self.parts = Parts()
        self.model = nn.ModuleDict(
            {
                "embeddings": nn.Embedding(shape.vocab_size, shape.width),
                "layers": nn.ModuleList(Block(shape, layer) for layer in range(shape.num_layers)),
                "norm": nn.LayerNorm(shape.width, NORM_EPS),
            }
        )
        self.lm_head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        nn.init.uniform_(cast(Tensor, self.model["embeddings"].weight), -1e-4, 1e-4)
        nn.init.orthogonal_(self.lm_head.weight, gain=0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits after each token of (rows, length), of `compute_type`."""
        layers = cast(list[Block], self.model["layers"])
        x = layers[0].pre_norm(self.model["embeddings"](tokens))
        first_value: Tensor | None = None
        parts = (
            self.parts if torch.is_grad_enabled() else Parts()
        )  # else each would be compiled once more, for no gradients
        for block in layers:
            x, first_value = block.attn(x, block.attn_norm, first_value, parts, self.compute_type)
            x = block.ffn(x, block.ffn_norm, parts, self.compute_type)
        return linear(self.model["norm"](x).to(self.compute_type), self.lm_head)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean of -log p of each token after the first of (rows, length + 1)."""
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).to(self.lm_head.weight.dtype), tokens[:, 1:].flatten())
