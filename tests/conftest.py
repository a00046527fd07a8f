"""Models that several tests share. The built-in ones come from the cache (`make test` pulls them first)."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, which reads it once
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker for each core; torch reads it once, too

from archerfish import ArrowEngine, HubConfig, LLMEngine
from archerfish.store.names import resolve_model
from tests.engine.tiny_llama import save_tiny_llama, tiny_config

# No test depends on the speed of the machine.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

MINILM = "all-minilm-l6-v2"
VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "dog",
    "sat",
    "on",
    "a",
    "mat",
    "fish",
    "spits",
    "water",
    "at",
    "fl",
    "##ies",
    "##s",
    "far",
    "away",
    "red",
    "blue",
    "green",
    ".",
    ",",
    "1",
    "2",
    "3",
    "中",
    "国",
]


def pytest_configure(config: pytest.Config) -> None:
    """A mark of pytest-cov's, which need not be there. For long tests of what others cover: most of their time is
    tracing."""
    config.addinivalue_line("markers", "no_cover: not traced for coverage")
    coverage = sys.modules.get("coverage")
    if hasattr(config, "workerinput") and coverage is not None and (first := coverage.Coverage.current()) is not None:
        first.stop()  # a worker of pytest-xdist starts a second one, and where `no_cover` stops that, this one would go on


def pytest_collection_finish() -> None:
    """What collection made (modules, tests, strategies) stays to the end: passes of the garbage collector leave it
    out."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ARCHERFISH_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _compile_when_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card each of many tiny models would compile all that any request needs, for a few requests."""
    if "TRITON_INTERPRET" not in os.environ:
        monkeypatch.setattr("archerfish.kernels.triton.compiling.compile_ahead", lambda *_: None)


@pytest.fixture(scope="session")
def minilm_source() -> Path:
    """The files of the real all-MiniLM-L6-v2."""
    return resolve_model(MINILM)


@pytest.fixture(scope="session")
def minilm() -> ArrowEngine:
    """The real all-MiniLM-L6-v2 as a user gets it."""
    return ArrowEngine(MINILM)


@pytest.fixture
def own_cache(minilm_source: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is converted goes into a cache of the test's own, even where nobody names one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> HubConfig:
    """A cache of its own for models that tests make, which never reaches the network."""
    return HubConfig(cache_dir=str(tmp_path_factory.mktemp("cache")), offline=True)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama without a tokenizer."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def engine(llama: Path) -> Iterator[LLMEngine]:
    """A fresh engine of the tiny Llama."""
    with LLMEngine(tiny_config(llama)) as made:
        yield made


TinyModel = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Makes directories as sentence-transformers saves them, with tiny random weights."""

    def make(
        family: str = "Bert", *, head: str = "Model", config: dict[str, Any] | None = None, **pooling: Any
    ) -> Path:
        return save_tiny_model(tmp_path_factory.mktemp(family.lower()), family, head, config or {}, pooling)

    return make


def save_tiny_model(where: Path, family: str, head: str, config: dict[str, Any], pooling: dict[str, Any]) -> Path:
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 2}
    if family == "DistilBert":
        sizes = {"dim": 32, "n_heads": 4, "hidden_dim": 64, "n_layers": 2}
    sizes |= {"vocab_size": len(VOCABULARY), "max_position_embeddings": 40}
    model_config = getattr(transformers, f"{family}Config")(**{**sizes, **config})
    model = getattr(transformers, f"{family}{head}")(model_config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    base = where / "base"
    model.save_pretrained(base)
    save_tokenizer(base, marks_pairs=family == "Bert")
    if head != "Model":
        return base
    modules: Any = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    transformer = modules.Transformer(str(base), max_seq_length=24)
    stack = [transformer, modules.Pooling(32, **{"pooling_mode": "mean", **pooling})]
    if not pooling.get("no_normalize"):
        stack.append(modules.Normalize())
    target = where / "model"
    SentenceTransformer(modules=stack, device="cpu").save(str(target))
    return target


def save_tokenizer(directory: Path, *, marks_pairs: bool) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    fast: Any = PreTrainedTokenizerFast
    fast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=40,
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if marks_pairs else [])],
    ).save_pretrained(directory)
