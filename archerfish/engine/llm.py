"""LLM: an LLMEngine with the interface of vLLM's class of that name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from archerfish.config import EmbedConfig, EngineConfig, HubConfig
from archerfish.engine.arrow_engine import ArrowEngine
from archerfish.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from archerfish.engine.inference_core import Vectors, kind_of
from archerfish.engine.llm_engine import LLMEngine, Message, Prompt
from archerfish.engine.llm_loading import make_runner, make_speculation
from archerfish.engine.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput, split_reasoning
from archerfish.engine.request_maker import is_token_ids
from archerfish.engine.text_batches import ACTIVATIONS, remark_cuts
from archerfish.engine.token_vectors import as_rows, compare, document_prompt
from archerfish.engine.vllm_options import ENCODER_TASKS, as_options, read_options, read_task
from archerfish.errors import InvalidInputError, StoppedError, UnsupportedModelError
from archerfish.kernels.machine import free_memory
from archerfish.params import SamplingParams
from archerfish.remarks import remark
from archerfish.store.names import resolve_model
from archerfish.text.tokenizer import TokenizedText, Tokenizer

Model = str | EngineConfig | EmbedConfig | None
FOR_GENERATION = frozenset(EngineConfig.names()) - {*EmbedConfig.names(), "tokenizer", "quantization", "max_model_len"}
ENGINE_PARTS = ("facts", "grammars", "requests", "runner", "scheduler", "tokenizer")  # that an LLMEngine has


class LLM(LLMEngine):
    """LLM(model="...", **options): an LLMEngine whose `generate` and `chat` have the arguments and results of vLLM's.

    It also takes the options of vLLM's LLM. An embedding model or a cross-encoder gives an EncoderLLM, which has
    `embed`, `encode`, `score` and `classify`; `task` ("generate", "embed", "score", "classify") says what is expected
    of a model.
    """

    def __new__(cls, model: Model = None, *, hub: HubConfig | None = None, **options: Any) -> Self:
        if cls is LLM and is_encoder(model, hub, options):
            return super().__new__(EncoderLLM)  # type: ignore[return-value]
        return super().__new__(cls)

    def __init__(self, model: Model = None, *, hub: HubConfig | None = None, **options: Any) -> None:
        task = read_task(options)
        if task in ENCODER_TASKS or isinstance(model, EmbedConfig):
            raise UnsupportedModelError(
                f"{model} generates text: it cannot do the task {task!r}.", hint="Leave out task."
            )
        read, hub = read_options(options, hub)
        self._sleep_level = 0
        super().__init__(model, hub=hub, **read)

    @classmethod
    def from_engine_args(cls, engine_args: Any, **_: Any) -> Self:
        """An engine of EngineArgs, or of a mapping of options."""
        return cls(**as_options(engine_args))

    @property
    def llm_engine(self) -> Self:
        """The engine itself."""
        return self

    def generate(
        self,
        prompts: Prompt | Mapping[str, Any] | Sequence[Prompt | Mapping[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        show_progress: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Results of one or more prompts, in their order. use_tqdm is another name of show_progress.

        A prompt may also be a dict with "prompt" or "prompt_token_ids".
        """
        shows = show_progress if use_tqdm is None else bool(use_tqdm)
        return super().generate(plain_prompts(prompts), sampling_params, show_progress=shows, **options)

    def chat(  # type: ignore[override]  # a list, as in vLLM, also for one conversation
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """The answers to one conversation or to several, always as a list."""
        prompts = [self.render_chat(one, **(template_options or {})) for one in conversations(messages)]
        given = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params] * len(prompts)
        params = [self.chat_template.stopping(one or self.get_default_sampling_params()) for one in given]
        return split_reasoning(self, self.generate(prompts, params, use_tqdm=use_tqdm, **options), params)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, lora_request: Any = None, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, best first."""
        plain = plain_prompts(prompts)
        many = [plain] if isinstance(plain, str) or is_token_ids(plain) else plain
        return beam_search(self, [self.requests.tokenize(prompt) for prompt in many], params, lora_request)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self.tokenizer is None:
            raise InvalidInputError(f"{self.model_name} has no tokenizer.", hint="Give prompts as lists of token ids.")
        return self.tokenizer

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: the KV blocks with all cached contexts, and at level 2 the weights too.

        Requests that run are aborted, and new ones are refused meanwhile.
        """
        if level not in (1, 2):
            raise InvalidInputError(f"level must be 1 (KV memory) or 2 (weights too), not {level!r}.")
        if self.config.num_ranks > 1:
            raise InvalidInputError(
                "An engine of several processes cannot sleep.", hint="Close it, and make a new one."
            )
        with self._changed:
            self._check_usable()
            self._sleep_level = level
            self._abort_all()
        self._collect_down_to(0)
        self.scheduler.cache.clear()
        self.scheduler.close()
        self.runner.close(keeps_model=level == 1)
        if self.adapters is not None and level == 2:
            self.adapters.detach()
        free_memory()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again that `sleep` gave back; weights are loaded from their files. tags has no effect."""
        if self._sleep_level and not self._is_closed:
            adapter = self.runner.model if self._sleep_level == 1 else None
            self.runner, self.facts = make_runner(self.facts, self.config, self._executor, adapter)
            self.scheduler.speculation = make_speculation(self.config, self.facts, self.runner)
            if self.adapters is not None and self._sleep_level == 2:
                self.adapters.attach(self.runner)
            self._sleep_level, self._has_idle_work = 0, True

    def is_sleeping(self) -> bool:
        return self._sleep_level > 0

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._sleep_level:
            raise StoppedError(f"{self.model_name} sleeps.", hint="Call wake_up() first.")

    # What an EncoderLLM has

    def embed(self, prompts: Any, **options: Any) -> list[PoolingRequestOutput]:
        """Vectors of texts, of an embedding model."""
        raise self._no_encoder("embed")

    def encode(self, prompts: Any, **options: Any) -> list[PoolingRequestOutput]:
        """What the encoder gives: vectors, or scores of labels."""
        raise self._no_encoder("encode")

    def score(self, data_1: Any, data_2: Any, **options: Any) -> list[PoolingRequestOutput]:
        """How well texts go together: a cross-encoder's score, or a cosine."""
        raise self._no_encoder("score")

    def classify(self, prompts: Any, **options: Any) -> list[PoolingRequestOutput]:
        """Probabilities of a classifier's labels."""
        raise self._no_encoder("classify")

    def _no_encoder(self, method: str) -> UnsupportedModelError:
        hint = 'Load an embedding model or a cross-encoder, as LLM("all-minilm-l6-v2").'
        return UnsupportedModelError(f"{self.model_name} generates text: it has no {method}().", hint=hint)


class EncoderLLM(LLM):
    """What `LLM(model)` gives for an encoder. `encoder` is the ArrowEngine."""

    def __init__(self, model: Model = None, *, hub: HubConfig | None = None, **options: Any) -> None:
        task = read_task(options)
        if task == "generate":
            hint = "Leave out task, and use embed(), score() or classify()."
            raise UnsupportedModelError(f"{model} is an encoder: it generates no text.", hint=hint)
        read, hub = read_options(options, hub)
        for name in [name for name in read if name in FOR_GENERATION]:
            del read[name]
            remark(name, f"The option {name} has no effect: it is one for models that generate text.")
        if "max_model_len" in read:
            read["max_length"] = read.pop("max_model_len")
        if isinstance(model, EngineConfig):
            model = EmbedConfig(
                model=model.model, device=model.device, dtype=model.dtype, num_threads=model.num_threads
            )
        self.encoder = ArrowEngine(read.pop("model") if model is None else model, hub=hub, **read)
        self.model_name = self.encoder.model_name
        self._ids = itertools.count()

    def __getattr__(self, name: str) -> Any:
        if name in ENGINE_PARTS:
            hint = "Use embed(), score() or classify()."
            raise UnsupportedModelError(f"{self.model_name} is an encoder: it generates no text.", hint=hint)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def embed(self, prompts: Any, *, normalize: bool = True, **options: Any) -> list[PoolingRequestOutput]:
        """A vector for each text, of length 1 unless normalize is false: `outputs.embedding`."""
        if self.encoder.is_cross_encoder:
            raise UnsupportedModelError(
                f"{self.model_name} is a cross-encoder: it has no vectors.", hint="Use score()."
            )
        tokenized = self.encoder.tokenize(self._texts(prompts, options))
        return self._results(tokenized, self.encoder.compute(tokenized, normalize))

    def encode(self, prompts: Any, **options: Any) -> list[PoolingRequestOutput]:
        """What `classify` gives, of a model with labels, else what `embed` gives: `outputs.data`. Of ColBERT's kind of
        models a row for each token, of SPLADE's token ids and weights."""
        encoder = self.encoder
        if encoder.core.output == "dense":
            return (self.classify if encoder.is_cross_encoder else self.embed)(prompts, **options)
        tokenized = encoder.tokenize(self._texts(prompts, options))
        return self._results(tokenized, list(map(as_rows, encoder.compute_tokens(tokenized, encoder.core.output))))

    def score(self, data_1: Any, data_2: Any, **options: Any) -> list[PoolingRequestOutput]:
        """A score for each pair: of one text with each of a list, or of two lists of the same length:
        `outputs.score`."""
        left = self._texts(data_1, options)
        right = self._texts(data_2, options)
        encoder = self.encoder
        given, left = left, left * len(right) if len(left) == 1 else left
        if len(left) != len(right):
            raise InvalidInputError(
                f"score takes one text and a list, or two lists of the same length, not {len(left)} and {len(right)} texts."
            )
        if not right:
            return []
        if encoder.core.output != "dense":
            queries, name = encoder.encode_query(given), document_prompt(encoder.prompts)
            queries, tokenized = (
                queries if len(given) > 1 else queries * len(right),
                encoder.tokenize(right, prompt_name=name),
            )
            documents = encoder.compute_tokens(tokenized, encoder.core.output)
            return self._results(tokenized, np.asarray(compare(encoder, queries, documents, is_pairwise=True)))
        if not encoder.is_cross_encoder:
            tokenized = encoder.tokenize([*left, *right])
            vectors = encoder.compute(tokenized, normalize=True)
            return self._results(tokenized[len(left) :], (vectors[: len(left)] * vectors[len(left) :]).sum(1))
        pairs = encoder.tokenize(list(zip(left, right, strict=True)))
        scores = encoder.compute(pairs)
        if scores.shape[1] != 1:
            raise UnsupportedModelError(f"{self.model_name} has {scores.shape[1]} labels.", hint="Use classify().")
        return self._results(pairs, scores[:, 0])

    def classify(self, prompts: Any, **options: Any) -> list[PoolingRequestOutput]:
        """Probabilities of the labels, for each text: `outputs.probs`."""
        encoder = self.encoder
        if not encoder.is_cross_encoder:
            raise UnsupportedModelError(f"{self.model_name} embeds texts: it has no labels.", hint="Use embed().")
        tokenized = encoder.tokenize(self._texts(prompts, options))
        rows = encoder.compute(tokenized, is_raw=True)
        return self._results(tokenized, ACTIVATIONS[encoder.core.label_activation](rows))

    def get_tokenizer(self) -> Tokenizer:
        return self.encoder.tokenizer  # type: ignore[return-value]

    def sleep(self, level: int = 1) -> None:
        """Nothing: an encoder keeps no memory beside its weights, which are mapped from their file."""
        remark("sleep", f"sleep has no effect on {self.model_name}, which is an encoder.")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Nothing: see `sleep`."""

    def is_sleeping(self) -> bool:
        return False

    def close(self) -> None:
        self.encoder.close()

    def __repr__(self) -> str:
        return f"LLM({self.model_name!r}, task={'score' if self.encoder.is_cross_encoder else 'embed'!r})"

    def _texts(self, prompts: Any, options: dict[str, Any]) -> list[Any]:
        for name in options.keys() - {"use_tqdm"}:
            remark(name, f"The option {name} has no effect on an encoder.")
        plain = plain_prompts(prompts)
        return [plain] if isinstance(plain, str) or is_token_ids(plain) else list(plain)

    def _results(self, texts: Sequence[TokenizedText], rows: Iterable[Vectors]) -> list[PoolingRequestOutput]:
        remark_cuts(self.encoder, texts)
        return [
            PoolingRequestOutput(f"request-{next(self._ids)}", PoolingOutput(row), text.token_ids.tolist())
            for text, row in zip(texts, rows, strict=True)
        ]


def is_encoder(model: Model, hub: HubConfig | None, options: Mapping[str, Any]) -> bool:
    """Whether a model is an embedding model or a cross-encoder, by the model_type of its files."""
    name = model if isinstance(model, str) else model.model if model is not None else options.get("model")
    if isinstance(model, EmbedConfig) or name is None:
        return isinstance(model, EmbedConfig)
    _, hub = read_options(options, hub)
    return (
        kind_of(resolve_model(str(name), hub, *([options["progress"]] if "progress" in options else [])))
        != "generation"
    )


def plain_prompts(prompts: Any) -> Any:
    """Prompts without the dicts of vLLM."""
    plain = [plain_prompt(prompts)] if isinstance(prompts, Mapping) else prompts
    if isinstance(plain, list | tuple) and not is_token_ids(plain):
        return [plain_prompt(one) for one in plain]
    return plain


def plain_prompt(prompt: Any) -> Any:
    """The prompt of a vLLM dict; anything else unchanged."""
    if not isinstance(prompt, Mapping):
        return prompt
    known = [prompt[key] for key in ("prompt", "prompt_token_ids") if prompt.get(key) is not None]
    if len(known) != 1 or len(prompt) != 1:
        keys = ", ".join(map(repr, prompt)) or "none"
        raise InvalidInputError(f"A prompt that is a dict has one key, 'prompt' or 'prompt_token_ids', not {keys}.")
    return known[0]


def conversations(messages: Any) -> list[Any]:
    """A list of conversations unchanged; anything else as one conversation, which the template checks."""
    is_many = (
        isinstance(messages, Sequence) and bool(messages) and all(isinstance(one, list | tuple) for one in messages)
    )
    return list(messages) if is_many else [messages]
