"""The only signatures of numerical work.

Models and layers are written over `Ops` and know tensors only as opaque handles of type T; only the backend knows what
a handle is. `torch/reference.py` gives every operation its meaning in plain torch, and each faster backend is tested
against it.

Activations are packed: the tokens of all sequences of a batch follow one another in a (num_tokens, width) tensor, and
`Segments` says where each sequence begins. A backend may append rows after the last token to suit its products; their
contents have no meaning, and `attention` and `pool` leave them out.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from archerfish.background import Lazy
from archerfish.errors import DeviceError, OutOfMemoryError
from archerfish.kernels.batches import BlockMask, Ids, Segments, T
from archerfish.kernels.formats import AUTO, PLAIN, WeightFormat
from archerfish.kernels.machine import trim_heap
from archerfish.kernels.ranks import ALONE, Ranks
from archerfish.types import Progress

if TYPE_CHECKING:
    from archerfish.kernels.adapters import Adapters, AdapterTable
    from archerfish.kernels.decoding import DecodeState, PassSize
    from archerfish.kernels.encoding import EncoderInputs
    from archerfish.kernels.experts import Routing
    from archerfish.kernels.recurrent import RecurrentOps
    from archerfish.kernels.sampling import Drawn, Logprobs, PoolStats, SamplingBatch, TokenCounts

# swiglu_oai is gate * sigmoid(SWIGLU_ALPHA * gate) of a gate of at most SWIGLU_LIMIT. What it is multiplied with is
# kept within -SWIGLU_LIMIT and SWIGLU_LIMIT, and 1 is added.
Activation = Literal["none", "gelu", "gelu_tanh", "relu", "relu_squared", "sigmoid", "silu", "tanh", "swiglu_oai"]
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
Pooling = Literal["mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens"]  # as sentence-transformers names them
KV_SCALE_BYTES = 4  # of a head of int8 keys or values
LACKS = ("out of memory", "alloc_failed", "can't allocate memory")  # of memory, in a RuntimeError of torch or CUDA


R = TypeVar("R")


class HeadShape(NamedTuple):
    """Heads of an attention layer; num_heads is a multiple of num_kv_heads, consecutive query heads share a KV head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores, usually head_dim ** -0.5
    window: int = 0  # a token sees itself and the window - 1 before it, and after it unless causal; 0: all
    softcap: float = 0.0  # scores become softcap * tanh(scores / softcap); 0: off
    is_causal: bool = True  # a token sees none after it; over blocks it is always so


class KVLayer(NamedTuple, Generic[T]):
    """Memory of one layer: (num_blocks, block_size, num_kv_heads, head_dim) each.

    In int8 each head has KV_SCALE_BYTES behind its numbers: the float32 that these are to be multiplied with.
    """

    keys: T
    values: T
    scales: T | None = None  # (2, num_kv_heads) float32: what keys and values in FP8 are to be multiplied with


@dataclass(frozen=True, eq=False)
class Rotary(Generic[T]):
    """Rotary embedding as a table: (positions, rotary_dim) float32, cosines in the first half of a row, sines in the
    second.

    The first rotary_dim of each head's dimensions are rotated: dimension i together with i + rotary_dim / 2, or
    neighbours together where it is interleaved.
    """

    cos_sin: T
    rotary_dim: int
    is_interleaved: bool = False


class Rotation(NamedTuple, Generic[T]):
    """How a layer's queries and keys become what attention takes: each head RMS-normalised, and then rotated.

    A norm with the factors of several heads normalises these together.
    """

    rotary: Rotary[T] | None = None
    q_norm: T | None = None
    k_norm: T | None = None
    eps: float = 0.0  # of the norms


@dataclass(frozen=True, eq=False)
class PagedBatch(Generic[T]):
    """Packed tokens of one step over KV blocks. Sequences with one new token stand first.

    Tensors of T may have more rows than there are tokens (a backend's filling): num_tokens counts the real ones.
    """

    num_tokens: int
    num_decodes: int  # leading sequences with exactly one new token
    query_lens: Ids  # host: new tokens of each sequence
    context_lens: Ids  # host: tokens of each sequence, the new ones included
    token_ids: T  # (tokens,)
    positions: T  # (tokens,)
    slots: T  # (tokens,) where each token's key and value go: block * block_size + offset
    block_tables: (
        T  # (sequences, most blocks of any) physical blocks, in order; entries past a sequence's last mean nothing
    )
    block_size: int
    is_deterministic: bool = False  # a sequence's numbers must not depend on the others in the batch
    num_shared: int = 0  # leading tokens whose keys all decodes have in the same blocks, as far as is known
    kept_rows: T | None = None  # those of the hidden states that are wanted; None: all
    adapters: T | None = None  # (tokens,): the slot of each token's adapter, 0 for none; None: no token has one


class NormWeights(NamedTuple, Generic[T]):
    """Of a layer norm, (width,) float32 each."""

    weight: T
    bias: T
    eps: float


class PackedWeight(ABC, Generic[T]):
    """Weight and bias of a linear map in the form in which a backend multiplies with their format."""

    @abstractmethod
    def multiply(self, x: T, activation: Activation, residual: T | None) -> T:
        """As `Ops.linear`."""


class LinearWeight(Lazy[PackedWeight[T]]):
    """A linear map, packed when first used."""

    is_partial = False  # it takes some of the inputs: its results are to be added up over the ranks
    adapter: AdapterTable[T] | None = None  # what adapters add to its results


class Ops(ABC, Generic[T]):
    """Operations of one backend on one device, computing in one type."""

    name: str
    device: str
    dtype: str
    reads_stored: bool = False  # takes a checkpoint's tensors as `StoredTensor`, not as tensors of torch
    kv_dtype: str = AUTO  # of new keys and values: int8, fp8, or the compute type
    rounds_rows: bool = (
        False  # with int8 matrices, what they are multiplied with may become bytes too: encoders bear it
    )
    is_deterministic: bool = False  # what a row of a product gives must not depend on how many rows there are
    ranks: Ranks = ALONE  # set before weights are taken
    activation_dtype: str = ""  # of what products give, where it is not `dtype`
    adapters: Adapters[T] | None = None  # made before weights are taken, if there are to be some

    def __init__(self) -> None:
        self._linear_weights: list[LinearWeight[T]] = []

    def linear_weight(
        self,
        parts: Sequence[T],
        biases: Sequence[T | None],
        weight_format: WeightFormat = PLAIN,
        *,
        is_partial: bool = False,
    ) -> LinearWeight[T]:
        """One or more matrices of a checkpoint, stacked along their outputs, for `linear`."""
        self._linear_weights.append(LinearWeight(lambda: self.pack_linear(parts, biases, weight_format)))
        self._linear_weights[-1].is_partial = is_partial
        return self._linear_weights[-1]

    def prepare(self, then: Callable[[], None] = lambda: None) -> None:
        """Pack all weights now instead of at their first use, maybe in the background. Safe while other threads
        compute.

        then: called when they are packed.
        """
        for weight in self._linear_weights:
            weight.get()
        then()

    def release(self) -> None:
        """Give the memory of all weights back, which must not be used any more."""
        self._linear_weights.clear()
        self.free_unused()
        trim_heap()

    @abstractmethod
    def tensor(self, values: npt.NDArray[Any] | T) -> T:
        """Numbers of the host as a tensor of the device, in their type; one that is there already is given back."""

    @abstractmethod
    def to_numpy(self, x: T) -> npt.NDArray[np.float32]:
        """A tensor of the device as a float32 array of the host."""

    @abstractmethod
    def to_device(self, tensor: T) -> T:
        """A tensor of a checkpoint on the device, in its stored type."""

    @abstractmethod
    def vector(self, weight: T, *, plus: float = 0.0, times: float = 1.0) -> T:
        """A small parameter (norm weight, bias) on the device in float32, with a number added to it, and then
        multiplied."""

    @abstractmethod
    def pack_linear(
        self, parts: Sequence[T], biases: Sequence[T | None], weight_format: WeightFormat
    ) -> PackedWeight[T]:
        """Stacked weights and biases in the form that `linear` multiplies with."""

    @abstractmethod
    def embed(self, tables: Sequence[T], ids: Sequence[T]) -> T:
        """Sum over the tables of their rows at the given ids, in float32."""

    @abstractmethod
    def layer_norm(self, x: T, norm: NormWeights[T]) -> T:
        """Layer normalisation over the last axis, computed in float32, given in the compute type."""

    def linear(self, x: T, weight: LinearWeight[T], *, activation: Activation = "none", residual: T | None = None) -> T:
        """activation(x @ weight.T + bias), or x @ weight.T + bias + residual, whose type and maybe memory the result
        has."""
        packed = weight.get()
        table = self.adapted(weight)
        is_partial = weight.is_partial
        if table is None or self.adapters is None:
            y = packed.multiply(x, activation, None if is_partial else residual)
        else:
            y = self.adapters.add(
                packed.multiply(x, "none", None if is_partial else residual), x, table, activation=activation
            )
        assert activation == "none" or not is_partial
        return cast(T, self.ranks.add_up(y, residual)) if is_partial else y

    def adapted(self, weight: LinearWeight[T]) -> AdapterTable[T] | None:
        """What adapters add to this product of the pass; nothing is fused with it then. None: nothing."""
        return None if self.adapters is None or self.adapters.rows is None else weight.adapter

    def new_adapters(self, num_slots: int, max_rank: int) -> Adapters[T]:
        """Slots for adapters, beside the linear maps that are made after `adapters` is set to them."""
        raise DeviceError(f"The backend {self.name!r} has no adapters.", hint="Leave out enable_lora.")

    def linear_layer_norm(self, x: T, weight: LinearWeight[T], residual: T, norm: NormWeights[T]) -> T:
        """layer_norm of x @ weight.T + bias + residual."""
        total = self.linear(x, weight, residual=residual)
        del x  # its memory goes back before the norm asks for some
        return self.layer_norm(total, norm)

    @abstractmethod
    def rotated(self, qkv: T, positions: T, heads: HeadShape, rotation: Rotation[T]) -> T:
        """What `attention` takes, its queries and keys normalised and rotated; it may have the memory of qkv."""

    @abstractmethod
    def attention(
        self, qkv: T, segments: Segments, heads: HeadShape, *, bias: T | None = None, sinks: T | None = None
    ) -> T:
        """Attention within each sequence. qkv: (tokens, (heads + 2 kv_heads) * head_dim); bias: (heads, longest,
        longest), added to scores. sinks: (heads,) float32, a score for each head that takes part in the softmax and has
        no value."""

    @abstractmethod
    def relative_bias(self, table: T, buckets: Ids) -> T:
        """(n, n) bucket numbers looked up in a (buckets, heads) table, as (heads, n, n) for `attention`."""

    @abstractmethod
    def pool(self, x: T, segments: Segments, mode: Pooling) -> T:
        """One float32 row per sequence."""

    @abstractmethod
    def normalize(self, x: T) -> T:
        """Rows scaled to length 1."""

    # Decoders: tokens stand over KV blocks, which `PagedBatch` describes.

    @abstractmethod
    def new_kv_layer(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> KVLayer[T]:
        """Memory for the blocks of one layer, in the type that kv_dtype says."""

    def fit_kv_scales(self, layers: Sequence[KVLayer[T]], num_blocks: int) -> None:
        """Set the scales of keys and values by those in the first blocks, which were stored with scales of 1."""
        raise TypeError(f"Keys and values of the backend {self.name!r} have no scales.")

    @abstractmethod
    def copy_blocks(self, layers: Sequence[KVLayer[T]], pairs: Sequence[tuple[int, int]]) -> None:
        """In every layer, copy block to block for each (from, to), at least one. No block is both source and target."""

    @abstractmethod
    def lookup(self, table: T, ids: T, *, scale: float = 1.0) -> T:
        """Rows of a table, times a factor, in the type in which layers add to them: the compute type, or float32."""

    def sum_dtype(self, width: int) -> str:
        """The type of what `lookup` gives, to which layers add."""
        return self.activation_dtype or self.dtype

    @abstractmethod
    def rotary(self, cos_sin: npt.NDArray[np.float32], rotary_dim: int, *, is_interleaved: bool = False) -> Rotary[T]:
        """A table of the host on the device."""

    @abstractmethod
    def rms_norm(self, x: T, weight: T, eps: float, *, residual: T | None = None) -> tuple[T, T]:
        """With s = x + residual (or x): RMS normalisation of s over the last axis, computed in float32, given in the
        compute type; and s itself, in the wider of their types."""

    @abstractmethod
    def add(self, x: T, residual: T) -> T:
        """The sum, in the wider of their types."""

    @abstractmethod
    def store_kv(self, qkv: T, kv: KVLayer[T], batch: PagedBatch[T], heads: HeadShape, rotation: Rotation[T]) -> T:
        """Split (tokens, (heads + 2 kv_heads) * head_dim) into q, k, v; normalise and rotate q and k; write k and v
        into their slots; give q as (tokens, heads * head_dim)."""

    @abstractmethod
    def paged_attention(
        self,
        q: T,
        kv: KVLayer[T],
        batch: PagedBatch[T],
        heads: HeadShape,
        *,
        mask: BlockMask[T] | None = None,
        sinks: T | None = None,
    ) -> T:
        """Causal attention of the new tokens over their sequences' blocks: (tokens, heads * head_dim)."""

    def store_and_attend(
        self,
        qkv: T,
        kv: KVLayer[T] | None,
        batch: Any,
        heads: HeadShape,
        rotation: Rotation[T],
        *,
        sinks: T | None = None,
    ) -> T:
        """`store_kv`, and `paged_attention` of what it gives. Without kv, the batch has whole sequences, of which
        nothing is
        stored: `rotated` and `attention`."""
        if kv is None:
            turned = self.rotated(qkv, self.tensor(batch.segments.positions), heads, rotation)
            return self.attention(turned, batch.segments, heads, sinks=sinks)
        q = self.store_kv(qkv, kv, batch, heads, rotation)
        del qkv  # its memory goes back before attention asks for some
        return self.paged_attention(q, kv, batch, heads, sinks=sinks)

    @abstractmethod
    def gated(self, x: T, activation: Activation) -> T:
        """activation(first half of the last axis) * second half, which `Activation` may change."""

    def gated_linear(self, x: T, weight: LinearWeight[T], gate: Activation) -> T:
        """linear, then gated."""
        return self.gated(self.linear(x, weight), gate)

    @abstractmethod
    def experts(
        self,
        x: T,
        logits: T,
        routing: Routing[T],
        gate_up: LinearWeight[T],
        down: LinearWeight[T],
        activation: Activation,
        *,
        shared: T | None = None,
    ) -> T:
        """The weighted sum of what the experts that a row chooses make of it: down(gated(gate_up(x))). A weight has a
        map for each expert, one below the other. shared: rows that are added, times sigmoid(last logit) where logits
        have one more."""

    def normed_linear(
        self,
        x: T,
        norm: T,
        eps: float,
        weight: LinearWeight[T],
        *,
        residual: T | None = None,
        gate: Activation | None = None,
    ) -> tuple[T, T]:
        """rms_norm by the factors in norm, then linear, then gated where a gate is given; and the sum that rms_norm
        gives."""
        x, total = self.rms_norm(x, norm, eps, residual=residual)
        return self.linear(x, weight) if gate is None else self.gated_linear(x, weight, gate), total

    @abstractmethod
    def rows(self, x: T, indices: Ids | T) -> T:
        """Rows of x, in its type, at indices of the host or the device."""

    def keep_rows(self, kept: T, *tensors: T) -> tuple[T, ...]:
        """`rows` of each tensor, with which alone the pass goes on."""
        if self.adapters is not None:
            self.adapters.keep(self.rows, kept)
        return tuple(self.rows(each, kept) for each in tensors)

    @abstractmethod
    def first_rows(self, x: T, num_rows: int) -> T:
        """The first rows of x, sharing its memory."""

    @abstractmethod
    def random_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, T]:
        """Small random tensors, always the same ones, for measuring without a checkpoint."""

    @abstractmethod
    def logits(self, x: T, head: LinearWeight[T], *, softcap: float = 0.0) -> T:
        """float32 scores over the vocabulary, softcap * tanh(scores / softcap) where softcap is not 0."""

    @abstractmethod
    def concat(self, parts: Sequence[T]) -> T:
        """Tensors one after the other along the first axis."""

    @abstractmethod
    def put(self, target: T, indices: Ids, values: T) -> None:
        """Write rows of values into target at host indices, in place."""

    def recurrent(self) -> RecurrentOps[T]:
        """Operations over states, for recurrent models."""
        raise DeviceError(f"The backend {self.name!r} has no recurrent models.", hint="Choose another one.")

    # Sampling: what the parameters mean stands in `sampling.py`.

    @abstractmethod
    def sample(self, logits: T, batch: SamplingBatch[T]) -> Drawn[T]:
        """One token for every row of float32 logits, which stay as they are; then the counts of penalised rows go
        up."""

    @abstractmethod
    def token_logprobs(self, logits: T, token_ids: T, num_top: int, *, rows: Ids | None = None) -> Logprobs[T]:
        """Log-softmax at one token of every row (or of some rows) of float32 logits, and at the num_top likeliest
        tokens."""

    @abstractmethod
    def new_counts(self, num_rows: int, vocab_size: int) -> TokenCounts[T]:
        """Memory for how often each token stands in prompt and output of each row."""

    @abstractmethod
    def set_counts(self, counts: TokenCounts[T], row: int, prompt: Ids, output: Ids) -> None:
        """Count the tokens of a row anew."""

    @abstractmethod
    def add_counts(self, counts: TokenCounts[T], row: int, output: Ids, *, source: int | None = None) -> None:
        """Count more tokens of a row's output; source: the row whose counts it gets first."""

    # Steps that are only decodes (`decoding.py`), which a backend may record and repeat.

    def new_decode_state(self, num_rows: int, most_blocks: int) -> DecodeState[T]:
        """Memory for so many sequences and one more row."""
        raise self._records_nothing()

    def set_tables(self, state: DecodeState[T], rows: Ids, block_tables: Ids) -> None:
        """Write block lists of the host, (rows, most blocks), into some rows."""
        raise self._records_nothing()

    def decode_batch(
        self, inputs: T, state: DecodeState[T], block_size: int, *, is_shared: bool
    ) -> tuple[PagedBatch[T], SamplingBatch[T]]:
        """What inputs say, for a model and for `sample`; the blocks in them go into the tables. is_shared: keys that
        all sequences share are to be read once for all."""
        raise self._records_nothing()

    def pass_batch(
        self, inputs: T, size: PassSize, state: DecodeState[T], block_size: int, *, keeps_all: bool
    ) -> tuple[PagedBatch[T], SamplingBatch[T], T]:
        """What inputs of a pass over prompts say, for a model and for `sample`, and the columns of the tokens to
        choose: with keeps_all behind every row, else behind the last of each column. Blocks come from the tables."""
        raise self._records_nothing()

    def scored_report(self, report: T, scores: Logprobs[T]) -> T:
        """(4 + 2 * num_top, rows) int64: the report of `Drawn`, ranks, logprobs, top_ids and top_logprobs, floats as
        bits."""
        raise self._records_nothing()

    def keep_tokens(self, inputs: T, state: DecodeState[T], tokens: T) -> None:
        """Write the tokens of a batch into the last_tokens of its sequences."""
        raise self._records_nothing()

    def _records_nothing(self) -> DeviceError:
        return DeviceError(f"The backend {self.name!r} records no steps of decodes.")

    def replayed(self, call: Callable[[Any], T]) -> Callable[[Any], T]:
        """A function of a batch that may be recorded when it is first called, and replayed with other batches
        afterwards. It must depend on nothing but the arrays of the batch, and on whether each of them is there."""
        return call

    can_record: bool = False  # `capture` records work

    def capture(self, call: Callable[[], R]) -> Callable[[], R] | None:
        """Record a call, which also runs it; the result repeats it. None: this backend cannot record."""
        return None

    def starting(self, key: str, rehearse: Callable[[], None], progress: Progress) -> AbstractContextManager[None]:
        """Around the first steps of a model; after it the model is ready. A backend that compiles kernels compiles all
        that `rehearse` launches before, computing nothing. key: what decides which these are, besides device and
        package."""
        return nullcontext()

    def compile_counts(self) -> Mapping[str, int]:
        """How many kernels were compiled before the model was ready, and after; nothing where none are compiled."""
        return {}

    def encoder_inputs(self, num_tokens: int) -> EncoderInputs[T] | None:
        """Memory for the inputs of recorded passes of an encoder over at most so many tokens. None: it cannot
        record."""
        return None

    def free_unused(self) -> None:
        """Give memory back to the device that nothing uses."""

    @abstractmethod
    def pool_stats(self) -> PoolStats:
        """Of the large arrays that are used again from step to step."""

    # Between host and device

    max_recorded_head_dim: int = 1 << 30  # of models whose decodes `decode_batch` can be used for
    is_async: bool = False  # operations return before they are done, in the order in which they were called

    def host_buffer(self, size: int) -> Ids:
        """Words of the host, from which `send` need not wait."""
        return np.zeros(size, dtype=np.int64)

    @abstractmethod
    def send(self, values: Ids, target: T) -> Callable[[], None]:
        """Begin to copy a host buffer onto an integer tensor of its shape; the result waits until it may be written
        again."""

    @abstractmethod
    def fetch(self, x: T) -> Callable[[], npt.NDArray[Any]]:
        """Begin to bring a tensor to the host; the result waits for it."""

    def computing(self) -> AbstractContextManager[object]:
        """The context of a thread while it computes."""
        return self.allocating("A step")

    @contextmanager
    def allocating(self, what: str) -> Iterator[None]:
        """The context of a thread while it takes memory; a lack of memory becomes an OutOfMemoryError that names
        `what`."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            words = str(error).lower()
            if isinstance(error, RuntimeError) and not any(lack in words for lack in LACKS):
                raise
            traceback.clear_frames(error.__traceback__)  # their tensors would live as long as the error
            self.free_unused()
            raise OutOfMemoryError.of(what, error) from error

    def pin_threads(self, is_wanted: bool) -> None:
        """Bind each of the threads that passes share to a core of its own, if that is wanted."""

    def start_thread(self, num_threads: int) -> None:
        """Called once in a thread that will run whole steps, with the number of cores that they may use (0: all)."""
