"""A model as it was published: what its reader gives to the converter, and the settings in its JSON files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from archerfish.errors import CorruptFileError, OutOfMemoryError, UnsupportedModelError
from archerfish.store.format import ITEM_BYTES, Row, TensorInfo, first_line, make_info
from archerfish.store.late_interaction import as_pylate, read_late_interaction

# Types by their names in safetensors and GGUF files.
DTYPE_CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
}


class SourceTensor(NamedTuple):
    """A tensor of a source.

    `load` reads it in the source's type, bfloat16 as its bits in uint16. A quantised tensor is dequantised to float32.
    """

    info: TensorInfo
    load: Callable[[], npt.NDArray[Any]]
    load_quantized: Callable[[], Row] | None = None  # if info.quantization is set

    def renamed(self, name: str) -> SourceTensor:
        return self._replace(info=self.info._replace(name=name))


class ModelSource(NamedTuple):
    """A model that its reader has opened."""

    kind: str  # safetensors, torch or gguf
    path: Path
    files: tuple[Path, ...]
    config: dict[str, Any]
    tensors: tuple[SourceTensor, ...]
    write_tokenizer: Callable[[Path], None]
    embedding: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    skipped: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def describe(self) -> dict[str, Any]:
        """What metadata.json says about the source."""
        files = [{"name": path.name, "bytes": path.stat().st_size} for path in self.files]
        return {"kind": self.kind, "name": self.path.name, "files": files, "skipped_buffers": list(self.skipped)}


def source_info(path: Path, name: Any, dtype: str, shape: Any) -> TensorInfo:
    """The TensorInfo of a source's tensor. Raises UnsupportedModelError for a type that the store does not have.

    dtype: torch's name of the type, or the one of safetensors and GGUF.
    """
    dtype = DTYPE_CODES.get(dtype, dtype)
    if dtype not in ITEM_BYTES:
        raise UnsupportedModelError(f"{path}: the tensor {name!r} has the type {dtype}, which is not supported.")
    return make_info(str(path), name, dtype, shape)


LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
EMBEDDING_MODELS = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "ColBERT")
WORLD_NAME = "rwkv_vocab_v20230424.txt"  # the vocabulary of RWKV models
# Modules of sentence-transformers in the order of their pipeline, and what comes out.
PIPELINES = {
    "dense": r"\w*Transformer( Pooling( Dense)*( Normalize)?)?",
    "sparse": r"\w*Transformer SpladePooling",
    "multi_vector": r"\w*Transformer( Dense)*( MultiVectorMask)?( Normalize)?",
    "score": r"\w*Transformer LogitScore",
}
LINEAR_FILES = ("sparse_linear.pt", "colbert_linear.pt")  # of BGE-M3, beside its weights
STANFORD_SETTINGS = "artifact.metadata"  # of ColBERT's own code


UNFORESEEN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, AssertionError)


@contextmanager
def reading(what: str = "This model") -> Iterator[None]:
    """Turns an error that no check of a model's files foresaw into an error of the model; a decorator, too."""
    try:
        yield
    except UNFORESEEN as error:
        why = f"{type(error).__name__}: {first_line(error):.200}"
        raise CorruptFileError(f"{what} has values that cannot be used ({why}).") from error
    except MemoryError as error:
        raise OutOfMemoryError.of(what, error) from error


def read_json(path: Path, kind: type = dict) -> Any:
    """The JSON object of a file, or its list when `kind` is list."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not valid JSON: {error}.") from error
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error.strerror}.") from error
    if not isinstance(value, kind):
        raise CorruptFileError(f"{path} does not hold a JSON {'object' if kind is dict else 'list'}.")
    return value


def optional_json(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file, or None when there is no such file."""
    return read_json(path) if path.is_file() else None


def token_name(role: str, *sources: Mapping[str, Any]) -> str | None:
    """The special token of a role, such as `bos_token`, in the first of some JSON objects that names it."""
    for source in sources:
        value = source.get(role)
        name = value.get("content") if isinstance(value, dict) else value
        if isinstance(name, str):
            return name
    return None


class Module(NamedTuple):
    """A part of a sentence-transformers model."""

    kind: str
    path: Path

    @property
    def config(self) -> dict[str, Any]:
        return optional_json(self.path / "config.json") or {}


class Pipeline(NamedTuple):
    """The modules of a sentence-transformers model; none where there is no modules.json."""

    modules: tuple[Module, ...]
    output: str  # a key of PIPELINES

    def of(self, kind: str) -> list[Module]:
        return [module for module in self.modules if module.kind == kind]


def read_modules(root: Path) -> Pipeline:
    path = root / "modules.json"
    if not path.is_file():
        return Pipeline((), "multi_vector" if is_stanford(root) else "dense")
    modules = []
    for entry in read_json(path, list):
        kind, folder = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
        if (
            not isinstance(kind, str)
            or not isinstance(folder, str)
            or ".." in Path(folder).parts
            or Path(folder).is_absolute()
        ):
            raise CorruptFileError(f"{path} describes a module without a type and a path below it.")
        modules.append(Module(kind.rpartition(".")[2], root / folder))
    kinds = " ".join(module.kind for module in modules)
    output = next((output for output, pattern in PIPELINES.items() if re.fullmatch(pattern, kinds)), None)
    if output is None:
        hint = "docs/embed.md lists those that are."
        raise UnsupportedModelError(
            f"{root} has sentence-transformers modules that are not supported: {kinds}.", hint=hint
        )
    return Pipeline(tuple(modules), output)


def is_stanford(root: Path) -> bool:
    """Whether ColBERT's own code saved it."""
    config = (optional_json(root / "config.json") or {}) if root.is_dir() else {}
    return "HF_ColBERT" in (config.get("architectures") or ())


def transformer_directory(root: Path) -> Path:
    """Where the model's own files lie."""
    modules = read_modules(root).modules
    return modules[0].path if modules else root


def cross_encoder_settings(root: Path) -> dict[str, Any]:
    """A cross-encoder's activation as version 4 of sentence-transformers kept it in config.json, and the tokens whose
    logits make a score.

    Version 5 keeps the activation in config_sentence_transformers.json.
    """
    settings = optional_json(root / "config_sentence_transformers.json") or {}
    found: dict[str, Any] = {}
    for module in read_modules(root).of("LogitScore"):
        ids = [module.config.get(name) for name in ("true_token_id", "false_token_id")]
        prompts, name = settings.get("prompts") or {}, settings.get("default_prompt_name")
        read = optional_json(transformer_directory(root) / "sentence_bert_config.json") or {}
        found |= {
            "score_token_ids": [token_id for token_id in ids if token_id is not None],
            "score_prompt": prompts.get(name) or "",
            "score_options": (read.get("processing_kwargs") or {}).get("chat_template") or {},
        }
    if settings.get("model_type") == "CrossEncoder" and settings.get("activation_fn") is not None:
        found["sentence_transformers"] = {"activation_fn": settings["activation_fn"]}
    return found


def read_embedding(root: Path) -> dict[str, Any] | None:
    """Pooling, normalisation, lengths and prompts of a sentence-transformers model; None when the files describe
    none."""
    pipeline = read_modules(root)
    modules = pipeline.modules
    transformer = modules[0].path if modules else root
    pooling = next((module.path for module in pipeline.of("Pooling")), root / "1_Pooling") / "config.json"
    settings = next((read_json(path) for path in sorted(transformer.glob("sentence_*_config.json"))), None)
    prompts = optional_json(root / "config_sentence_transformers.json")
    if not modules and pipeline.output == "multi_vector":
        prompts = as_pylate(optional_json(root / STANFORD_SETTINGS) or {})
    if not modules and settings is None and prompts is None and not pooling.is_file():
        return None
    is_other = prompts is not None and prompts.get("model_type", EMBEDDING_MODELS[0]) not in EMBEDDING_MODELS
    if is_other or pipeline.output == "score":
        return None
    pooling_config = read_json(pooling) if pipeline.of("Pooling") else optional_json(pooling)
    normalize = bool(pipeline.of("Normalize")) if modules else (root / "2_Normalize").is_dir()
    return {
        **make_embedding(root, pooling_config or {}, settings or {}, prompts or {}, normalize=normalize),
        **read_parts(root, pipeline, settings or {}, prompts or {}),
    }


def read_parts(
    root: Path, pipeline: Pipeline, settings: Mapping[str, Any], stated: Mapping[str, Any]
) -> dict[str, Any]:
    """What comes behind the transformer, besides pooling and normalisation."""
    if settings.get("query_expansion") and pipeline.output != "multi_vector":
        raise UnsupportedModelError(f"{root} has query_expansion, but gives one vector a text: that is not supported.")
    layers = []
    for module in pipeline.of("Dense"):
        config = module.config
        activation = (
            str(config.get("activation_function", "Tanh")).rpartition(".")[2].lower().replace("identity", "none")
        )
        if config.get("use_residual"):
            raise UnsupportedModelError(f"{root} has a Dense module with use_residual, which is not supported.")
        sizes = config.get("in_features"), config.get("out_features")
        layers.append({"name": module.path.name, "sizes": sizes, "activation": activation})
    found: dict[str, Any] = {"layers": layers} if layers else {}
    if pipeline.output != "dense":
        found["output"] = pipeline.output
    for module in pipeline.of("SpladePooling"):
        found |= {"splade": {"activation_function": "relu", "pooling_strategy": "max", **module.config}}
    if pipeline.output == "multi_vector":
        mask = next((module.config for module in pipeline.of("MultiVectorMask")), None)
        if mask is not None and mask.get("keep_only_token_ids"):
            raise UnsupportedModelError(
                f"{root} keeps the vectors of images alone (keep_only_token_ids): it reads no texts."
            )
        found |= read_late_interaction(root, stated, settings, mask)
        if not pipeline.modules:  # its tensor says how large the layer is
            found["layers"] = [{"name": "", "sizes": (0, 0), "activation": "none"}]
    return found


def make_embedding(
    root: Path, pooling: dict[str, Any], settings: dict[str, Any], prompts: dict[str, Any], *, normalize: bool
) -> dict[str, Any]:
    max_seq_length = settings.get("max_seq_length")
    if max_seq_length is not None and (type(max_seq_length) is not int or max_seq_length < 1):
        raise CorruptFileError(f"{root}: max_seq_length is {max_seq_length!r}.")
    named = prompts.get("prompts") or {}
    if not isinstance(named, dict) or not all(isinstance(text, str | None) for text in named.values()):
        raise CorruptFileError(f"{root}/config_sentence_transformers.json: 'prompts' must map names to texts.")
    return {
        "pooling_mode": pooling_mode(root, pooling),
        "normalize": normalize,
        "max_seq_length": max_seq_length,
        "do_lower_case": bool(settings.get("do_lower_case", False)),
        "include_prompt": bool(pooling.get("include_prompt", True)),
        "prompts": {name: text for name, text in named.items() if text is not None},
        "default_prompt_name": prompts.get("default_prompt_name"),
        "similarity_fn_name": prompts.get("similarity_fn_name"),
    }


def pooling_mode(root: Path, pooling: dict[str, Any]) -> str:
    """The pooling mode, from the old or the new style of configuration. The default is mean, as in
    sentence-transformers."""
    legacy = [mode for key, mode in LEGACY_POOLING.items() if pooling.get(key)] or ["mean"]
    named = pooling.get("pooling_mode") or legacy
    modes = named if isinstance(named, list) else [named]
    if len(modes) != 1 or modes[0] not in LEGACY_POOLING.values():
        raise UnsupportedModelError(f"{root} has the pooling {named!r}, which is not supported.")
    return str(modes[0])
