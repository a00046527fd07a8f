"""How texts get into the forward passes of an encoder, and in which form their vectors get out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from archerfish.errors import InputTooLargeError, InvalidInputError
from archerfish.kernels.batches import Segments
from archerfish.models.adapter import TokenBatch
from archerfish.remarks import remark
from archerfish.text.tokenizer import Text, TokenizedText, are_strings
from archerfish.util import Precision, quantize_embeddings

if TYPE_CHECKING:
    import torch

    from archerfish.engine.arrow_engine import ArrowEngine
    from archerfish.engine.inference_core import Vectors

FIRST_WINDOW, WINDOW = 256, 2048  # texts that are tokenised before the first pass, and while passes run
SMALL_BATCH = 128  # tokens; a smaller pass mostly reads weights
EmbedInput = str | Sequence[int]


@dataclass(frozen=True)
class RerankResult:
    """One document of a reranking: where it stood in the list, and how relevant it is."""

    index: int
    score: float
    document: str


def plan_batches(lengths: Sequence[int], max_tokens: int, num_workers: int = 1) -> list[list[int]]:
    """Indices grouped into batches of at most max_tokens tokens, longest first. A longer text is a batch of its own.

    Batches are smaller where some of num_workers would have none. Each takes the longest text that is left, then
    repeatedly the longest that still fits. Full batches cost least per token, and few distinct sizes need few compiled
    products.
    """
    max_tokens = min(max_tokens, max(SMALL_BATCH, -(-sum(lengths) // num_workers)))
    order = sorted(range(len(lengths)), key=lengths.__getitem__)  # ascending: the longest is cheap to take
    sizes = [lengths[i] for i in order]
    batches: list[list[int]] = []
    while order:
        room = max_tokens - sizes.pop()
        batch = [order.pop()]
        while (end := bisect_right(sizes, room)) > 0:
            size = sizes[end - 1]
            start = max(bisect_left(sizes, size), end - room // size) if size else 0  # as many of one size as fit
            batch += order[start:end][::-1]
            room -= size * (end - start)
            del sizes[start:end], order[start:end]
        batches.append(batch)
    return batches


def pack(texts: Sequence[TokenizedText]) -> TokenBatch:
    """One packed batch of texts that have the same num_attended, in the order given."""
    segments = Segments(tuple([len(text.token_ids) for text in texts]))
    token_ids = np.concatenate([text.token_ids for text in texts])
    type_ids = None
    if any(text.type_ids is not None and text.type_ids.any() for text in texts):
        type_ids = np.concatenate([np.zeros_like(ids) if types is None else types for ids, types, *_ in texts])
    return TokenBatch(token_ids, segments, type_ids, texts[0].num_attended)


def check_text(text: str, name: str, max_bytes: int, max_tokens: int) -> None:
    """Refuse a text that is too long, or that cannot be encoded."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{name} holds half a character (lone surrogate) at position {error.start}.") from None
    if num_bytes > max_bytes:
        hint = f"Split it, or raise max_text_bytes; the model reads the first {max_tokens} tokens in any case."
        raise InputTooLargeError(f"{name} has {num_bytes:,} bytes; the limit is {max_bytes:,}.", hint=hint)


def is_token_ids(item: Any, vocab_size: int) -> bool:
    """Whether an input is a list of token ids. Ids outside of the vocabulary are refused."""
    if not isinstance(item, list | tuple) or not item or not all(type(i) is int for i in item):
        return False
    for token_id in item:
        if not 0 <= token_id < vocab_size:
            raise InvalidInputError(
                f"Token id {token_id} is outside of the vocabulary of {vocab_size}.",
                hint="Token ids must be those of this model's tokenizer. langchain's OpenAIEmbeddings sends another's, "
                "unless it has check_embedding_ctx_length=False.",
            )
    return True


def is_text(item: EmbedInput | tuple[str, str]) -> TypeGuard[Text]:
    """Whether an input is a text or a pair of texts, and not token ids."""
    return isinstance(item, str) or isinstance(item[0], str)


def windows(inputs: list[Any]) -> Iterator[list[int]]:
    """Places of inputs, longest first: a short first window, so that computing starts at once, then longer ones."""
    lengths = list(map(len if are_strings(inputs) else rough_length, inputs))
    places = sorted(range(len(inputs)), key=lengths.__getitem__, reverse=True)
    if places:
        yield places[:FIRST_WINDOW]
    for start in range(FIRST_WINDOW, len(places), WINDOW):
        yield places[start : start + WINDOW]


def rough_length(item: Any) -> int:
    """Characters, or token ids at about four characters each."""
    if isinstance(item, str):
        return len(item)
    return sum(len(part) if isinstance(part, str) else 4 for part in item)


def converted(vectors: Vectors, precision: Precision, to_tensor: bool, to_numpy: bool) -> Any:
    """Vectors as the caller wants them: quantised or not; an array, a tensor or a list of tensors."""
    found: Any = vectors
    if precision != "float32" and precision is not None:
        found = quantize_embeddings(vectors, precision)
    if to_numpy and not to_tensor:
        return found
    import torch

    found = torch.from_numpy(found)
    return found if to_tensor else list(found)


def softmax(scores: Vectors) -> Vectors:
    """Rows of probabilities of several labels. The score of a single label is kept as it is."""
    if scores.shape[1] == 1:
        return scores
    powers: Vectors = np.exp(scores - scores.max(1, keepdims=True))
    powers /= powers.sum(1, keepdims=True)
    return powers


def sigmoid(scores: Vectors) -> Vectors:
    found: Vectors = (1.0 / (1.0 + np.exp(-scores.astype(np.float64)))).astype(np.float32)
    return found


ACTIVATIONS: dict[str, Callable[[Vectors], Vectors]] = {  # of scores, by the names of torch's modules
    "identity": lambda scores: scores,
    "sigmoid": sigmoid,
    "softmax": softmax,
    "tanh": np.tanh,
    "relu": lambda scores: np.maximum(scores, 0),
}


def without_padding(text: TokenizedText, pad_id: int | None) -> TokenizedText:
    """Without padding at its end, behind which transformers' classifiers by decoders do not look."""
    others = np.flatnonzero(text.token_ids != pad_id)
    return text._replace(token_ids=text.token_ids[: others[-1] + 1]) if len(others) else text


def one_or_all(texts: Any, found: Any) -> Any:
    """What was found for a single text, or everything for a list."""
    return found[0] if isinstance(texts, str) else found


def all_values(
    token_vectors: Sequence[torch.Tensor], tokenized: Sequence[TokenizedText], vectors: Vectors
) -> list[dict[str, torch.Tensor]]:
    """For each text its token ids, their mask, their vectors and its vector."""
    import torch

    ids = [torch.tensor(text.token_ids) for text in tokenized]
    columns: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": [torch.ones_like(one) for one in ids],
        "token_embeddings": token_vectors,
        "sentence_embedding": torch.from_numpy(vectors),
    }
    return [{name: column[row] for name, column in columns.items()} for row in range(len(ids))]


def remark_cuts(engine: ArrowEngine, texts: Iterable[TokenizedText], task: str | None = None) -> None:
    """Say, once for an engine and a kind of text, that texts are cut."""
    if any(text.is_cut for text in texts):
        most, what = engine.most_tokens(task), task or "text"
        text = f"{engine.model_name} reads {most:,} tokens of a {what}. Longer ones were cut: split them."
        remark(f"{id(engine)} {text}", text)  # an engine of the same model at the same address has said the same


def remark_device(device: Any, own: str) -> None:
    """Say that a device other than the engine's own has no effect."""
    listed = device if isinstance(device, list | tuple) else [device or own]
    if {str(one).split(":")[0] for one in listed} != {own}:
        remark("device", f"device={device} is ignored: the engine was made for {own}.")
