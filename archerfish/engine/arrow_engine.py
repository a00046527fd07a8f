"""ArrowEngine: embeddings and reranking from weights that are mapped, not read."""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from archerfish.background import finish_before_fork, in_background
from archerfish.config import EmbedConfig, HubConfig
from archerfish.engine import text_batches, token_vectors
from archerfish.engine.inference_core import InferenceCore, Output, Vectors, load_tensors, locate
from archerfish.engine.progress import progress_bar
from archerfish.engine.text_batches import EmbedInput, RerankResult, is_text, pack, plan_batches
from archerfish.errors import InvalidInputError, InvalidOptionError, StoppedError, UnsupportedModelError, did_you_mean
from archerfish.kernels.pool import ComputePool, compute_pool
from archerfish.kernels.select import import_torch, log_device
from archerfish.store.loader import WeightLoader
from archerfish.store.source import reading
from archerfish.text.tokenizer import FastTokenizer, Text, TokenizedText, are_strings, read_settings, stated_max_length
from archerfish.types import Closing, Progress, no_progress
from archerfish.util import Precision, is_vectors

if TYPE_CHECKING:
    import torch

    from archerfish.text.pair_prompt import PairPrompt

TOKENS_PER_TEXT = 32  # of one unit of batch_size
GPU_BATCH_FACTOR = 64  # tokens of a pass on a GPU, in passes on a core
Batch = tuple[list[int], Callable[[], Vectors]]  # places of a pass's texts, and a function that waits for their vectors


class ArrowEngine(Closing):
    """Embeds and reranks texts with the model of a converted directory.

    `model_path` is a converted directory, any other model that the store can convert (it is converted once, into the
    cache), or an EmbedConfig. Keywords are options of EmbedConfig. Safe to use from several threads at once.
    """

    def __init__(
        self,
        model_path: str | Path | EmbedConfig,
        device: str = "auto",
        max_batch_size: int = 32,
        use_fast_tokenizer: bool = True,
        *,
        hub: HubConfig | None = None,
        progress: Progress = no_progress,
        **options: Any,
    ) -> None:
        started = time.perf_counter()
        if isinstance(model_path, EmbedConfig):
            self.config = model_path.replace(**options)
        else:
            self.config = EmbedConfig(
                model=str(model_path),
                device=device,
                max_batch_size=max_batch_size,
                use_fast_tokenizer=use_fast_tokenizer,
                **options,
            )
        if not self.config.use_fast_tokenizer:
            raise InvalidOptionError("use_fast_tokenizer=False is refused: the Rust tokenizer is the only one.")
        directory = locate(self.config, hub or HubConfig(), progress)
        was_collecting = gc.isenabled()
        gc.disable()  # a full collection right after importing torch takes four times as long as a load
        try:
            self._open(directory)
        finally:
            if was_collecting:
                gc.enable()
        self.core.warm_up(self._packed, progress)
        self.load_seconds = time.perf_counter() - started

    @reading()
    def _open(self, directory: Path) -> None:
        """Map the weights and build the model. Matrices are packed in the background; the first text loads the
        tokenizer."""
        self.directory, self._loader = directory, WeightLoader(directory)
        metadata = self._loader.get_metadata()
        named = self.config.model
        self.model_name: str = str(metadata.get("model_name") or directory.name) if Path(named).exists() else named
        self.embedding: dict[str, Any] = metadata.get("embedding") or {}
        self.prompts: dict[str, str] = {"query": "", "document": "", **(self.embedding.get("prompts") or {})}
        self.default_prompt_name: str | None = self.embedding.get("default_prompt_name")
        self.similarity_fn_name: str = self.embedding.get("similarity_fn_name") or "cosine"
        self.truncate_dim: int | None = None  # what `encode` cuts vectors to, unless it is told otherwise
        options: dict[str, Any] = {"dtype": self.config.dtype, "weight_format": self.config.weights}
        self.core = InferenceCore(load_tensors(self._loader, self.config), metadata, self.config.device, **options)
        self.core.ops.pin_threads(self.config.pin_threads)
        log_device(self.model_name, self.config.device, self.core.dtype)
        settings = read_settings(directory / "tokenizer" / "tokenizer_config.json")
        most, wanted = self.core.max_positions, self.config.max_length
        if wanted > most:
            raise InvalidOptionError(f"[embed] max_length is {wanted}, but {self.model_name} has {most} positions.")
        # As in sentence-transformers: the length that the model states, else its tokenizer's.
        self._max_length = wanted or min(
            most, self.embedding.get("max_seq_length") or stated_max_length(settings) or most
        )
        # Whether the tokens of a pair's second text have another type id: as the tokenizer's files say, if the model
        # can.
        names, has_table = settings.get("model_input_names"), self.core.config.integer("type_vocab_size", 2) > 1
        self._uses_types = has_table and (names is None or "token_type_ids" in names)
        self.watcher: Callable[[int, float], None] | None = None  # called with a number of texts and their seconds
        self._loader.check_tokenizer()
        token_vectors.check_expansion(self)
        self._is_closed, self._packed = False, finish_before_fork(self.pool.submit(self._pack_and_release))

    @property
    def pool(self) -> ComputePool:
        """Where passes are computed."""
        return compute_pool(
            self.core.device, self.config.num_threads
        )  # not kept: a forked process has a pool of its own

    def _pack_and_release(self) -> None:
        """Pack the matrices, then release the mapped originals, so that weights are in memory once."""
        packed: Future[None] = Future()
        self.core.ops.prepare(lambda: packed.set_result(None))
        packed.result()
        self._loader.release()

    @cached_property
    def tokenizer(self) -> FastTokenizer:
        stated, config = self.embedding, self.core.config
        options: Any = {"markers": stated.get("markers") or (), "lowers": bool(stated.get("do_lower_case"))}
        options["num_ids"] = config.integer("vocab_size")
        options["num_types"] = config.integer("type_vocab_size", 2) if self._uses_types else None
        return FastTokenizer(self.directory / "tokenizer", self._max_length, **options)

    @cached_property
    def pair_prompt(self) -> PairPrompt:
        """Of a decoder that ranks by the logits of tokens."""
        from archerfish.text.pair_prompt import PairPrompt

        return PairPrompt(self.directory, self.core.config.values)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Kinds of vectors that the model gives, that which it is made for first."""
        return tuple(self.core.outputs)

    @property
    def is_cross_encoder(self) -> bool:
        return self.core.head is not None

    def get_embedding_dimension(self) -> int:
        """Length of a vector."""
        return min(self.truncate_dim or self.core.dimension, self.core.dimension)

    get_sentence_embedding_dimension = get_embedding_dimension

    @property
    def max_seq_length(self) -> int:
        """The number of tokens, special ones included, at which a text is cut. It can be set."""
        return self._max_length

    @max_seq_length.setter
    def max_seq_length(self, length: int) -> None:
        if not 0 < length <= self.core.max_positions:
            limit = f"{self.model_name} has {self.core.max_positions} positions"
            raise InvalidOptionError(f"max_seq_length cannot be {length}: {limit}, and a text has at least one token.")
        self._max_length = length

    def get_max_seq_length(self) -> int:
        return self._max_length

    def most_tokens(self, task: str | None = None) -> int:
        """The number of tokens at which a query or document is cut: late-interaction models have their own. task: or
        the name of a prompt."""
        stated = token_vectors.most_tokens(self, task)
        return min(stated, self.config.max_length or self.core.max_positions) if stated else self._max_length

    def encode(
        self,
        texts: str | Iterable[EmbedInput],
        batch_size: int = 32,
        show_progress: bool = False,
        *,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        output_value: str | None = "sentence_embedding",
        precision: Precision = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        show_progress_bar: bool | None = None,
        pool: Any = None,
        chunk_size: int | None = None,
        output: Output | None = None,
        task: str | None = None,
    ) -> Any:
        """Vectors of texts: (dim,) for one string, (n, dim) float32 for a list, in its order.

        The list may be any iterable: an array, a series, a generator. A text may also be a list of token ids, special
        tokens included. batch_size bounds a forward pass, in units of 32 tokens. normalize=None follows the model's
        files.

        output="sparse" gives a SparseVector for each text, "multi_vector" an array of (tokens, dim), of models that
        have them. Without it a model gives what it is made for.

        The other arguments are those of sentence-transformers. prompt is put before every text; prompt_name names one
        of the model's prompts. normalize_embeddings=False means: as the model's files say. truncate_dim keeps the first
        numbers. output_value="token_embeddings" gives a tensor of (tokens, dim) for each text; None gives a dict of all
        tensors. convert_to_tensor gives a tensor, convert_to_numpy=False a list of tensors. pool and chunk_size have no
        effect: all cores are used anyway. task, "query" or "document", says how long texts are, where a model treats
        them differently.
        """
        is_other = isinstance(texts, Iterable) and not isinstance(texts, Sequence | Mapping | Set)
        many: Any = (
            [texts] if isinstance(texts, str) else list(texts) if is_other else texts
        )  # of an array or a generator
        self.check_texts(many)
        if self.is_cross_encoder:
            raise UnsupportedModelError(f"{self.model_name} is a cross-encoder: it scores pairs.", hint="Use rerank().")
        if output_value not in ("sentence_embedding", "token_embeddings", None):
            hint = "Known: 'sentence_embedding', 'token_embeddings' and None."
            raise InvalidInputError(f"output_value cannot be {output_value!r}.", hint=hint)
        if convert_to_tensor or not convert_to_numpy or output_value != "sentence_embedding":
            import_torch()
        text_batches.remark_device(device, self.core.device)
        if (output := output or self.core.output) != "dense":
            task, as_tensors = task or prompt_name, convert_to_tensor or not convert_to_numpy
            tokenized = self._tokenize(self._prepare(many, prompt_name, prompt), task)
            text_batches.remark_cuts(self, tokenized, task)
            options: Any = {"batch_size": batch_size, "normalize": normalize_embeddings or normalize}
            rows = self.compute_tokens(tokenized, output, is_query=task == "query", **options)
            shown = token_vectors.shown_as(rows, as_tensors=as_tensors, truncate_dim=truncate_dim, precision=precision)
            return text_batches.one_or_all(texts, shown)
        inputs, is_normal = self._prepare(many, prompt_name, prompt), normalize_embeddings or normalize
        with progress_bar(
            "Encoding", show=show_progress if show_progress_bar is None else show_progress_bar
        ) as progress:
            if output_value == "token_embeddings":
                return text_batches.one_or_all(texts, self._compute_tokens(inputs, batch_size)[0])
            vectors = self._compute(inputs, batch_size, self._is_scaled(is_normal), progress)
        if truncate_dim := truncate_dim or self.truncate_dim:
            vectors = vectors[:, :truncate_dim]
            if is_normal:
                vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        if output_value is None:
            return text_batches.one_or_all(
                texts, text_batches.all_values(*self._compute_tokens(inputs, batch_size), vectors)
            )
        return text_batches.one_or_all(
            texts, text_batches.converted(vectors, precision, convert_to_tensor, convert_to_numpy)
        )

    def encode_query(self, *texts: Any, **options: Any) -> Any:
        """`encode` with the model's prompt for queries, if it has one."""
        return self.encode(*texts, **{"prompt_name": "query", "task": "query", **options})

    def encode_document(self, *texts: Any, **options: Any) -> Any:
        """`encode` with the model's prompt for documents, if it has one: "document", "passage" or "corpus"."""
        name = token_vectors.document_prompt(self.prompts)
        return self.encode(*texts, **{"prompt_name": name, "task": "document", **options})

    def encode_batch(self, texts: Sequence[EmbedInput], normalize: bool | None = True) -> Vectors:
        """(n, dim) vectors of a list of texts, of length 1 unless normalize is false."""
        if isinstance(texts, str):
            raise InvalidInputError("encode_batch takes a list of texts, not one string.", hint="Use encode() for one.")
        vectors: Vectors = self.encode(texts, self.config.max_batch_size, normalize=normalize)
        return vectors

    def generate_batch(self, inputs: Sequence[EmbedInput]) -> list[Vectors]:
        """One vector for each input, for a BatchInferenceServer."""
        return list(self.encode_batch(inputs))

    def similarity(self, a: Any, b: Any) -> Any:
        """Similarity of each text of a with each of b, (len(a), len(b)); a single string counts as a list of one.

        Texts are compared by cosine, and the result is an array. Vectors are compared as the model's files say
        (`similarity_fn_name`), and the result is a tensor, as in sentence-transformers; without torch an array.
        """
        if is_vectors(a) and is_vectors(b):
            return token_vectors.compare(self, a, b)
        if is_vectors(a) or is_vectors(b):
            raise InvalidInputError("similarity() takes texts or vectors, not both.", hint="Encode the texts first.")
        left, right = ([x] if isinstance(x, str) else list(x) for x in (a, b))
        if self.core.output != "dense":
            return token_vectors.scores_of(
                self.encode_query(left), self.encode_document(right), self.similarity_fn_name
            )
        vectors = self.encode([*left, *right], self.config.max_batch_size, normalize=True)
        return vectors[: len(left)] @ vectors[len(left) :].T

    def similarity_pairwise(self, a: Any, b: Any) -> Any:
        """Similarity of each vector of a with the vector of b in the same place, as a tensor."""
        return token_vectors.compare(self, a, b, is_pairwise=True)

    def rerank(self, query: str, documents: Sequence[str], top_k: int | None = None) -> list[RerankResult]:
        """Documents by relevance to the query, best first: by a cross-encoder's score, or by cosine with an embedding
        model."""
        self.check_texts([query])
        self.check_texts(documents, "document")
        if self.is_cross_encoder:
            scores: Vectors = self.score_pairs([(query, document) for document in documents])
            if scores.ndim != 1:
                raise UnsupportedModelError(
                    f"{self.model_name} gives {scores.shape[1]} labels per pair; reranking needs one."
                )
        else:
            scores = self.similarity(query, documents)[0]
        order = np.argsort(-scores, kind="stable")[:top_k]
        return [RerankResult(int(i), float(scores[i]), documents[i]) for i in order]

    def score_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        batch_size: int = 32,
        show_progress: bool = False,
        *,
        is_raw: bool = False,
    ) -> Vectors:
        """A cross-encoder's score of every pair, (n,), or (n, labels) where the model has several labels.

        is_raw: without the activation that the model's files name.
        """
        if not self.is_cross_encoder:
            raise UnsupportedModelError(
                f"{self.model_name} is no cross-encoder: it embeds texts.", hint="Use similarity()."
            )
        self._check_pairs(pairs)
        with progress_bar("Scoring", show=show_progress) as progress:
            scores = self._compute([(a, b) for a, b in pairs], batch_size, False, progress, is_raw=is_raw)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    @property
    def labels(self) -> list[str]:
        """The names of a classifier's labels."""
        names = self.core.config.values.get("id2label") or {}
        return [str(names.get(str(i), f"LABEL_{i}")) for i in range(self.core.config.num_labels)]

    def classify(self, texts: Sequence[EmbedInput | tuple[str, str]], *, is_raw: bool = False) -> Vectors:
        """Probabilities of a classifier's `labels` for texts or pairs, (n, labels). is_raw: its own scores, such as
        rewards."""
        if not self.is_cross_encoder:
            raise UnsupportedModelError(f"{self.model_name} has no labels: it embeds texts.", hint="Use encode().")
        self._check_pairs(texts, allows_texts=True)
        rows = self.compute(self._tokenize(texts), is_raw=True)
        return rows if is_raw else text_batches.ACTIVATIONS[self.core.label_activation](rows)

    def tokenize(
        self, texts: Sequence[EmbedInput | tuple[str, str]], *, prompt_name: str | None = None
    ) -> list[TokenizedText]:
        """Check and tokenise texts, lists of ids, or a cross-encoder's texts and pairs.

        Another thread may call `compute` with them.
        """
        if self.is_cross_encoder:
            self._check_pairs(texts, allows_texts=True)
            return self._tokenize(texts)
        self.check_texts(texts)
        return self._tokenize(self._prepare(texts, prompt_name), prompt_name)

    def compute_tokens(
        self,
        texts: Sequence[TokenizedText],
        output: Output,
        *,
        batch_size: int | None = None,
        is_query: bool = False,
        normalize: bool | None = None,
    ) -> token_vectors.TokenVectors:
        """Sparse vectors or vectors of tokens, of tokenised texts."""
        self._check_open(output)
        max_tokens = self._batch_tokens(batch_size or self.config.max_batch_size)
        is_normal = (self.core.output == "dense" or self._is_scaled(None)) if normalize is None else normalize
        return token_vectors.compute_token_vectors(
            self, texts, max_tokens, output, normalize=is_normal, is_query=is_query
        )

    def compute(
        self, texts: Sequence[TokenizedText], normalize: bool | None = None, *, is_raw: bool = False
    ) -> Vectors:
        """(n, dim) vectors of tokenised texts, or (n, labels) scores of tokenised pairs, in their order. is_raw: scores
        without activation."""
        self._check_open()
        started = time.perf_counter()
        max_tokens = self._batch_tokens(self.config.max_batch_size)
        batches = plan_batches([len(text.token_ids) for text in texts], max_tokens, self.pool.num_workers)
        start = self.pool.run if len(batches) == 1 else self.pool.submit
        running = [start(self._run, batch, [texts[i] for i in batch], self._is_scaled(normalize)) for batch in batches]
        finished = (batch.result() if isinstance(batch, Future) else batch for batch in running)
        return self._collect(len(texts), finished, started, len(texts), is_raw=is_raw)

    def _is_scaled(self, normalize: bool | None) -> bool:
        stated = bool(self.embedding.get("normalize", False)) if normalize is None else normalize
        return stated and not self.is_cross_encoder

    def _collect(
        self,
        num_texts: int,
        finished: Iterable[Batch],
        started: float,
        num_inputs: int,
        progress: Progress = no_progress,
        *,
        is_raw: bool = False,
    ) -> Vectors:
        """Vectors or scores in the order of the texts. num_inputs: for the watcher. is_raw: scores without
        activation."""
        width = self.core.config.num_labels if self.is_cross_encoder else self.core.dimension
        out = np.empty((num_texts, width), dtype=np.float32)
        num_finished = 0
        for rows, wait in finished:
            out[rows] = wait()
            num_finished += len(rows)
            progress(num_finished, num_texts, "")
        if self.watcher is not None and num_inputs:
            self.watcher(num_inputs, time.perf_counter() - started)
        return text_batches.ACTIVATIONS[self.core.activation](out) if self.is_cross_encoder and not is_raw else out

    def count_tokens(self, texts: Sequence[EmbedInput | tuple[str, str]]) -> list[int]:
        """Tokens that each text costs after truncation."""
        return [len(t.token_ids) for t in self._tokenize(list(texts))]

    def check_texts(self, texts: Sequence[Any], what: str = "text") -> None:
        """Raise an InvalidInputError that names the first item that cannot be encoded."""
        if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
            hint = "Give a list of strings."
            raise InvalidInputError(f"Expected a list of texts, not {type(texts).__name__}.", hint=hint)
        limit = self.config.max_text_bytes
        if are_strings(texts) and all(map(str.isascii, texts)) and max(map(len, texts), default=0) <= limit:
            return
        for index, text in enumerate(texts):
            name = f"{what.capitalize()} {index}"
            if isinstance(text, str):
                text_batches.check_text(text, name, limit, self._max_length)
            elif not text_batches.is_token_ids(text, self.core.config.integer("vocab_size")):
                raise InvalidInputError(f"{name} must be a string, not {type(text).__name__}.")

    def _check_pairs(self, pairs: Sequence[Any], *, allows_texts: bool = False) -> None:
        for index, pair in enumerate(pairs):
            is_pair = isinstance(pair, list | tuple) and len(pair) == 2
            if not is_pair and not (allows_texts and isinstance(pair, str)):
                raise InvalidInputError(f"Pair {index} must be two texts, not {pair!r:.80}.")
        for side in (0, 1):
            self.check_texts([pair if isinstance(pair, str) else pair[side] for pair in pairs], "pair")

    def _check_open(self, output: Output = "dense") -> None:
        if self._is_closed:
            raise StoppedError("This ArrowEngine has been closed.", hint="Make a new one.")
        if output not in self.core.outputs:
            hint = f"It has: {', '.join(self.outputs)}."
            raise UnsupportedModelError(f"{self.model_name} has no {output} vectors.", hint=hint)

    def close(self) -> None:
        """Refuse further work and give the memory back."""
        self._is_closed = True
        self.core.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and not sys.is_finalizing():
            self.core.close()

    def __repr__(self) -> str:
        core = self.core
        size = (
            f"labels={core.config.num_labels}"
            if self.is_cross_encoder
            else f"dimension={self.get_embedding_dimension()}"
        )
        about = f"device={core.device!r}, dtype={core.dtype!r}, {size}, max_seq_length={self._max_length}"
        return f"{type(self).__name__}({self.model_name!r}, {about})"

    def _prepare(self, texts: Sequence[Any], prompt_name: str | None = None, prompt: str | None = None) -> list[Any]:
        """Texts as the model wants them, and token ids as tuples."""
        name = prompt_name or self.default_prompt_name
        if prompt is None and name and name not in self.prompts:
            raise InvalidInputError(f"{self.model_name} has no prompt {name!r}.", hint=did_you_mean(name, self.prompts))
        prompt = prompt if prompt is not None else self.prompts[name] if name else ""
        if prompt and not self.embedding.get("include_prompt", True):
            raise UnsupportedModelError(
                f"{self.model_name} leaves its prompt out of the pooling, which is not supported."
            )
        if not prompt and are_strings(texts):
            return list(texts)
        return [prompt + text if isinstance(text, str) else tuple(text) for text in texts]

    def _tokenize(self, inputs: Sequence[EmbedInput | tuple[str, str]], task: str | None = None) -> list[TokenizedText]:
        if self.core.config.score_token_ids:
            pairs = [item if isinstance(item, tuple) else ("", item) for item in inputs]
            return self.pair_prompt.tokenize(pairs, self._max_length)
        texts: Sequence[Text] = inputs if are_strings(inputs) else [item for item in inputs if is_text(item)]
        most = self.most_tokens(task)
        tokenized = self.tokenizer.tokenize(texts, most)
        if not self._uses_types:
            tokenized = [text._replace(type_ids=None) for text in tokenized]
        if len(texts) < len(inputs):
            read = iter(tokenized)
            tokenized = [
                next(read) if is_text(item) else TokenizedText(np.array(item[:most], np.int64), is_cut=len(item) > most)
                for item in inputs
            ]
        if self.core.head is not None and self.core.head.pooling == "lasttoken":
            tokenized = [
                text_batches.without_padding(text, self.core.config.values.get("pad_token_id")) for text in tokenized
            ]
        return token_vectors.expand_queries(self, tokenized, task)

    def _compute(
        self, inputs: Sequence[Any], batch_size: int, normalize: bool, progress: Progress, *, is_raw: bool = False
    ) -> Vectors:
        """Rows for all inputs. Each distinct input is computed once, while the next window is being tokenised."""
        self._check_open()
        started = time.perf_counter()
        distinct = list(dict.fromkeys(inputs))
        progress(0, len(distinct), "")
        batches = self._stream(distinct, self._batch_tokens(batch_size), normalize)
        out = self._collect(len(distinct), batches, started, len(inputs), progress, is_raw=is_raw)
        if len(distinct) == len(inputs):
            return out
        row_of = {item: row for row, item in enumerate(distinct)}
        return out[[row_of[item] for item in inputs]]

    def _compute_tokens(self, inputs: Sequence[Any], batch_size: int) -> tuple[list[torch.Tensor], list[TokenizedText]]:
        """Vectors of all tokens of each input, and its tokens."""
        import torch

        self._check_open()
        tokenized = self._tokenize(inputs)
        text_batches.remark_cuts(self, tokenized)
        batches = plan_batches([len(text.token_ids) for text in tokenized], self._batch_tokens(batch_size))
        running = [self.pool.submit(self.core.run_tokens, pack([tokenized[i] for i in batch])) for batch in batches]
        found: dict[int, torch.Tensor] = {}
        for batch, rows in zip(batches, running, strict=True):
            parts = torch.split(torch.from_numpy(rows.result()), [len(tokenized[i].token_ids) for i in batch])
            found |= zip(batch, parts, strict=True)
        return [found[i] for i in range(len(inputs))], tokenized

    def _batch_tokens(self, batch_size: int) -> int:
        if not isinstance(batch_size, int) or batch_size < 1:
            hint = "" if isinstance(batch_size, int) else "The second argument is batch_size; give the others by name."
            raise InvalidInputError(f"batch_size must be a number from 1 on, not {batch_size!r}.", hint=hint)
        factor = 1 if self.core.device == "cpu" else GPU_BATCH_FACTOR
        return min(batch_size, self.config.max_batch_size) * TOKENS_PER_TEXT * factor

    def _stream(self, inputs: list[Any], max_tokens: int, normalize: bool) -> Iterator[Batch]:
        """Batches, in the order in which they end. At most two windows compute while the next one is tokenised."""
        running: deque[Future[Batch]] = deque()
        pending = text_batches.windows(inputs)
        window = next(pending, [])
        tokenized = self._tokenize([inputs[i] for i in window])
        try:
            while window:
                text_batches.remark_cuts(self, tokenized)
                following = next(pending, [])
                texts = [inputs[i] for i in following]
                coming = in_background(partial(self._tokenize, texts), "tokenizer", daemon=True) if following else None
                batches = plan_batches([len(t.token_ids) for t in tokenized], max_tokens, self.pool.num_workers)
                num_earlier = len(running)
                if len(batches) == 1 and len(window) == len(inputs):
                    yield self.pool.run(self._run, window, tokenized, normalize)
                    return
                for batch in batches:
                    places, batch_texts = [window[i] for i in batch], [tokenized[i] for i in batch]
                    running.append(self.pool.submit(self._run, places, batch_texts, normalize))
                for _ in range(num_earlier):
                    yield running.popleft().result()
                window, tokenized = following, coming.result() if coming else []
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()

    def _run(self, places: list[int], texts: list[TokenizedText], normalize: bool) -> Batch:
        return places, self.core.start(pack(texts), normalize=normalize)
