"""SentenceTransformer and CrossEncoder: an ArrowEngine with the constructors and methods of sentence-transformers'
classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from archerfish.config import HubConfig
from archerfish.engine.arrow_engine import ArrowEngine
from archerfish.engine.text_batches import EmbedInput, converted, remark_device, softmax
from archerfish.errors import UnsupportedModelError
from archerfish.kernels.select import import_torch
from archerfish.remarks import remark

if TYPE_CHECKING:
    import torch

# Arguments of their constructors that have no effect here, and why.
IGNORED = {
    "trust_remote_code": "code of a model is never run",
    "cache_folder": "models of the hub are in the cache of huggingface_hub, which HF_HOME moves",
    "token": "set HF_TOKEN, or log in with `hf auth login`",
    "use_auth_token": "set HF_TOKEN, or log in with `hf auth login`",
    "backend": "there is one backend for each device",
    "config_kwargs": "the model's files are used as they are",
    "processor_kwargs": "the model's files are used as they are",
    "tokenizer_kwargs": "the model's files are used as they are",
    "model_card_data": "models are not trained here",
}


class SentenceTransformer(ArrowEngine):
    """An ArrowEngine for programs that were written for sentence-transformers."""

    def __init__(
        self,
        model_name_or_path: str,
        device: Any = None,
        *,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: str | None = None,
        truncate_dim: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model_name_or_path, **engine_options(device, options))
        self.prompts |= prompts or {}
        self.default_prompt_name = default_prompt_name or self.default_prompt_name
        self.similarity_fn_name = str(
            getattr(similarity_fn_name, "value", similarity_fn_name) or self.similarity_fn_name
        )
        self.truncate_dim = truncate_dim

    def encode(self, texts: Any = None, *rest: Any, sentences: Any = None, inputs: Any = None, **options: Any) -> Any:
        """`ArrowEngine.encode`; the texts may also be named as in either version of sentence-transformers."""
        given: Any = next((each for each in (texts, sentences, inputs) if each is not None), None)
        return super().encode(given, *rest, **options)

    @property
    def device(self) -> torch.device:
        found: torch.device = import_torch("SentenceTransformer.device").device(self.core.device)
        return found

    def to(self, device: Any = None, *_: Any, **__: Any) -> SentenceTransformer:
        """An engine stays on its device."""
        remark_device(getattr(device, "type", device), self.core.device)
        return self

    def eval(self) -> SentenceTransformer:
        """Models are not trained here."""
        return self

    def tokenize(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:  # type: ignore[override]  # as theirs
        """Padded `input_ids` and `attention_mask` of texts."""
        return self.tokenizer.encode(texts, self.max_seq_length)

    def start_multi_process_pool(self, target_devices: Sequence[str] | None = None) -> dict[str, Any]:
        """A pool for `encode_multi_process`. It holds nothing: `encode` uses all cores, or the card, by itself."""
        return {"input": None, "output": None, "processes": []}

    @staticmethod
    def stop_multi_process_pool(pool: Mapping[str, Any]) -> None:
        """Nothing is to be stopped."""

    def encode_multi_process(self, sentences: Sequence[EmbedInput], pool: Mapping[str, Any], **options: Any) -> Any:
        return self.encode(sentences, **options)


class CrossEncoder(ArrowEngine):
    """A model that scores pairs of texts, with the methods of sentence-transformers' class of that name."""

    def __init__(
        self,
        model_name_or_path: str,
        num_labels: int | None = None,
        max_length: int | None = None,
        device: Any = None,
        *,
        activation_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model_name_or_path, **{"max_length": max_length or 0, **engine_options(device, options)})
        self.activation_fn = activation_fn
        if not self.is_cross_encoder:
            hint = "Use SentenceTransformer, whose rerank() compares by cosine."
            raise UnsupportedModelError(f"{self.model_name} is no cross-encoder: it embeds texts.", hint=hint)
        if num_labels not in (None, self.num_labels):
            raise UnsupportedModelError(f"{self.model_name} has {self.num_labels} labels, not {num_labels}.")

    @property
    def num_labels(self) -> int:
        return self.core.config.num_labels

    def predict(
        self,
        sentences: Sequence[Any],
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        *,
        activation_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        apply_softmax: bool = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        pool: Any = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Scores of pairs of texts, (n,), or (n, labels) where the model has several labels; of a single pair its
        score.

        activation_fn takes the place of the activation that the model's files name. pool and chunk_size have no effect.
        """
        remark_device(device, self.core.device)
        is_single = len(sentences) == 2 and isinstance(sentences[0], str)
        pairs, activation = [tuple(sentences)] if is_single else sentences, activation_fn or self.activation_fn
        torch = import_torch() if activation or convert_to_tensor or not convert_to_numpy else None
        scores = self.score_pairs(pairs, batch_size, bool(show_progress_bar), is_raw=activation is not None)
        scores = activation(torch.from_numpy(scores)).numpy() if torch and activation else scores
        scores = softmax(scores) if apply_softmax and scores.ndim > 1 else scores
        found = converted(scores, "float32", convert_to_tensor, convert_to_numpy)
        return found[0] if is_single else found

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Documents by their score, best first: their places (corpus_id), scores and, if wanted, texts."""
        if self.num_labels != 1:
            raise UnsupportedModelError(
                f"{self.model_name} gives {self.num_labels} labels per pair; ranking needs one."
            )
        self.check_texts(documents, "document")
        scores = self.predict([(query, document) for document in documents], **options).tolist()
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_k]
        texts = [{"text": documents[i]} if return_documents else {} for i in order]
        return [{"corpus_id": i, "score": scores[i], **text} for i, text in zip(order, texts, strict=True)]


def engine_options(device: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of their constructors as those of ArrowEngine. What has no effect is said in the log."""
    known = dict(options)
    for name, reason in IGNORED.items():
        value = known.pop(name, None)
        if value and value != "torch":
            remark(name, f"{name} is ignored: {reason}.")
    model_kwargs = dict(known.pop("model_kwargs", None) or {})
    for name in ("torch_dtype", "dtype"):
        if name in model_kwargs:
            known["dtype"] = str(model_kwargs.pop(name)).removeprefix("torch.")
    for name in model_kwargs:
        remark(f"model_kwargs {name}", f"model_kwargs: {name} is ignored.")
    revision, is_offline = known.pop("revision", None), known.pop("local_files_only", False)
    if revision or is_offline:
        hub = known.get("hub") or HubConfig()
        known["hub"] = hub.replace(revision=revision or hub.revision, offline=is_offline or hub.offline)
    name, _, _ = str(device or "auto").partition(":")  # "cuda:0"
    return {**known, "device": name}
