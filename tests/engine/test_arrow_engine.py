"""ArrowEngine on the real MiniLM against sentence-transformers, and its behaviour towards callers."""

from __future__ import annotations

import inspect
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from archerfish import ArrowEngine, EmbedConfig, HubConfig, ModelConverter, errors
from archerfish.engine.text_batches import plan_batches
from tests.store.models import flip_byte, write_model

TEXTS = [
    "hello",
    "",
    "A short text.",
    "今天天气很好，我们去公园散步吧。",
    "🎉🚀 emoji ❤️ and text",
    "word " * 600,
    "x" * 300,
    "  spaces before and after  ",
    "The archerfish spits water at flies. " * 12,
    "naïve café, ÜBER",
    "line\nbreak\ttab",
]


@pytest.fixture(scope="session")
def peer(minilm_source: Path) -> SentenceTransformer:
    return SentenceTransformer(str(minilm_source), device="cpu")


@pytest.fixture(scope="session")
def their_vectors(peer: SentenceTransformer) -> Any:
    return peer.encode(TEXTS)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"dtype": "float32", "storage_dtype": "float32"}, 0.999999),
        ({"dtype": "bfloat16", "storage_dtype": "float16"}, 0.9999),
        ({"dtype": "float16", "storage_dtype": "bfloat16"}, 0.9999),
    ],
    ids=str,
)
def test_same_vectors_as_sentence_transformers(their_vectors: Any, options: dict[str, Any], least: float) -> None:
    ours = ArrowEngine("all-minilm-l6-v2", **options).encode(TEXTS)
    assert (ours * their_vectors).sum(1).min() >= least


def test_truncation_is_identical(minilm: ArrowEngine, peer: SentenceTransformer) -> None:
    assert minilm.get_max_seq_length() == peer.max_seq_length == 256
    theirs = peer.tokenizer(TEXTS, truncation=True, max_length=256)["input_ids"]
    assert [t.token_ids.tolist() for t in minilm._tokenize(TEXTS)] == theirs


def test_signatures_of_the_seed() -> None:
    first, *rest = list(inspect.signature(ArrowEngine).parameters.values())[:4]
    assert first.name == "model_path"
    assert {each.name: each.default for each in rest} == {
        "device": "auto",
        "max_batch_size": 32,
        "use_fast_tokenizer": True,
    }
    encode = inspect.signature(ArrowEngine.encode).parameters
    assert (encode["batch_size"].default, encode["show_progress"].default) == (32, False)


def test_order_is_kept_and_batches_do_not_matter(minilm: ArrowEngine) -> None:
    texts = [f"text number {i} " + "word " * (i * 7 % 40) for i in range(60)]
    together = minilm.encode(texts)
    alone = np.stack([minilm.encode(text, batch_size=1) for text in texts])
    assert (together * alone).sum(1).min() > 0.9998  # in bfloat16 the order of sums differs with the batch
    assert np.argmax(together @ alone.T, axis=1).tolist() == list(range(60))


def test_equal_texts_are_computed_once_without_padding(minilm: ArrowEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    start = minilm.core.start

    def count(batch: Any, **how: Any) -> Any:
        lengths.extend(batch.segments.lengths)
        assert len(batch.token_ids) == sum(batch.segments.lengths)
        return start(batch, **how)

    monkeypatch.setattr(minilm.core, "start", count)
    vectors = minilm.encode(["same", "other one", "same", "same"] * 50)
    assert sorted(lengths) == [3, 4]
    assert np.array_equal(vectors[0], vectors[2])
    assert np.array_equal(vectors[1], vectors[197])


def test_threads_get_the_same_vectors(minilm: ArrowEngine) -> None:
    jobs = [[f"thread {t} text {i} " + "word " * (i % 30) for i in range(20)] for t in range(4)]
    expected = [minilm.encode(job) for job in jobs]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(minilm.encode, jobs))
    for a, b in zip(expected, found, strict=True):
        assert (a * b).sum(1).min() > 0.9998


def test_torch_threads_of_the_caller_do_not_change(minilm: ArrowEngine) -> None:
    def here_and_in_a_new_thread() -> tuple[int, int]:
        with ThreadPoolExecutor(1) as thread:
            return torch.get_num_threads(), thread.submit(torch.get_num_threads).result()

    before = here_and_in_a_new_thread()
    minilm.encode([f"text {i}" for i in range(500)])
    assert here_and_in_a_new_thread() == before


def test_token_ids_are_taken_as_they_are(minilm: ArrowEngine) -> None:
    ids = minilm._tokenize(["The cat sat."])[0].token_ids.tolist()
    np.testing.assert_allclose(minilm.encode([ids])[0], minilm.encode("The cat sat."), atol=1e-6)
    with pytest.raises(errors.InvalidInputError, match=r"Token id 99999 .* check_embedding_ctx_length=False"):
        minilm.encode([[101, 99999, 102]])


def test_encode_batch_normalises_by_default(minilm: ArrowEngine) -> None:
    assert minilm.encode([]).shape == (0, 384) and minilm.encode("x").dtype == np.float32
    assert np.allclose(np.linalg.norm(minilm.encode_batch(["a", "b c d"]), axis=1), 1, atol=1e-5)
    raw = minilm.encode_batch(["a", "b c d"], normalize=False)
    assert not np.allclose(np.linalg.norm(raw, axis=1), 1, atol=0.1)
    with pytest.raises(errors.InvalidInputError, match="list of texts"):
        minilm.encode_batch("one string")


def test_similarity_and_reranking_by_cosine(minilm: ArrowEngine) -> None:
    documents = ["Bread is baked in an oven.", "A kitten is a young cat.", "The stock market fell."]
    assert minilm.similarity("What is a baby cat called?", documents).shape == (1, 3)
    first, second = minilm.rerank("What is a baby cat called?", documents, top_k=2)
    assert (first.index, first.document) == (1, documents[1]) and first.score > second.score


def test_progress_is_drawn_on_standard_error(minilm: ArrowEngine, capfd: pytest.CaptureFixture[str]) -> None:
    minilm.encode(["a", "b", "c"], show_progress=True)
    captured = capfd.readouterr()
    assert "3/3" in captured.err
    assert captured.out == ""
    minilm.encode(["a", "b", "c"])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        (["fine", 7], {}, errors.InvalidInputError, "Text 1 must be a string, not int"),
        (["fine", None], {}, errors.InvalidInputError, "Text 1 must be a string, not NoneType"),
        ([b"bytes"], {}, errors.InvalidInputError, "Text 0 must be a string, not bytes"),
        (["ok", []], {}, errors.InvalidInputError, "Text 1 must be a string, not list"),
        (7, {}, errors.InvalidInputError, "Expected a list of texts, not int"),
        ({"a": 1}, {}, errors.InvalidInputError, "Expected a list of texts, not dict"),
        (b"bytes", {}, errors.InvalidInputError, "Expected a list of texts, not bytes"),
        (["fine", "broken \ud800 text"], {}, errors.InvalidInputError, "Text 1"),
        (["a"], {"batch_size": 0}, errors.InvalidInputError, "batch_size"),
        (
            ["fine", "x" * 10_000_000],
            {},
            errors.InputTooLargeError,
            "Text 1 has 10,000,000 bytes; the limit is 1,000,000",
        ),
    ],
    ids=lambda value: str(value)[:30].encode("ascii", "replace").decode(),
)
def test_invalid_texts_are_refused(
    minilm: ArrowEngine, texts: Any, options: dict[str, Any], error: type[errors.ArcherfishError], message: str
) -> None:
    with pytest.raises(error, match=message):
        minilm.encode(texts, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"use_fast_tokenizer": False}, errors.InvalidOptionError, "Rust tokenizer"),
        ({"devise": "cpu"}, errors.UnknownOptionError, "device"),
        ({"device": "tpu"}, errors.InvalidOptionError, "cpu, cuda"),
        ({"max_length": 513}, errors.InvalidOptionError, "512 positions"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[errors.ArcherfishError], message: str) -> None:
    with pytest.raises(error, match=message):
        ArrowEngine("all-minilm-l6-v2", **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_device_is_an_error() -> None:
    with pytest.raises(errors.DeviceError, match="cuda"):
        ArrowEngine("all-minilm-l6-v2", device="cuda")


def test_a_missing_directory_is_an_error(hub: HubConfig) -> None:
    with pytest.raises(errors.ModelNotFoundError, match="no/such/model"):
        ArrowEngine("./no/such/model", hub=hub)


def test_a_closed_engine_refuses(tiny_model: Any, hub: HubConfig) -> None:
    with ArrowEngine(tiny_model(), hub=hub) as engine:
        assert engine.encode("the cat").shape == (32,)
    with pytest.raises(errors.StoppedError):
        engine.encode("the cat")


def test_a_config_object_and_keywords_make_the_same_engine(tiny_model: Any, hub: HubConfig) -> None:
    path = str(tiny_model())
    a = ArrowEngine(EmbedConfig(model=path, dtype="float32"), hub=hub)
    b = ArrowEngine(path, dtype="float32", hub=hub)
    assert a.config == b.config
    assert np.array_equal(a.encode("the cat"), b.encode("the cat"))


def test_an_unknown_architecture_is_refused(hub: HubConfig, tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedModelError, match="berd"):
        ArrowEngine(write_model(tmp_path, model_type="berd"), hub=hub)


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, 40))
def test_each_batch_takes_the_longest_that_fits(lengths: list[int], max_tokens: int) -> None:
    left = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for batch in plan_batches(lengths, max_tokens):
        assert batch[0] == left.pop()
        room = max_tokens - lengths[batch[0]]
        for place in batch[1:]:
            assert place == next(i for i in reversed(left) if lengths[i] <= room)
            left.remove(place)
            room -= lengths[place]
        assert not any(lengths[i] <= room for i in left)
    assert not left


FORKED = """
import os, signal
from archerfish import ArrowEngine
engine = ArrowEngine("all-minilm-l6-v2")
early = os.fork()  # while matrices are being packed
if early == 0:
    signal.alarm(60)
    os._exit(0 if abs(engine.encode("text 7").sum()) > 0 else 3)
assert os.waitpid(early, 0)[1] == 0
assert all(weight.made for weight in engine.core.ops._linear_weights)
texts = [f"text {i}" for i in range(300)]
before = engine.encode(texts)
child = os.fork()
if child == 0:
    signal.alarm(60)
    after = engine.encode(texts)
    one = engine.encode("text 7")
    os._exit(0 if (after * before).sum(1).min() > 0.999 and (one * before[7]).sum() > 0.999 else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_can_encode(minilm_source: Path) -> None:
    """The parent's threads do not survive a fork: red if the child waits for them."""
    out = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert out.stdout == "0\n", out.stderr


def test_any_iterable_of_texts(minilm: ArrowEngine) -> None:
    expected = minilm.encode(["the cat", "the dog"])
    for texts in (("the cat", "the dog"), np.array(["the cat", "the dog"]), (t for t in ["the cat", "the dog"])):
        np.testing.assert_allclose(minilm.encode(texts), expected, atol=1e-2)


def test_a_damaged_tokenizer_is_found_when_the_model_is_opened(tiny_model: Any, tmp_path: Path) -> None:
    target = tmp_path / "converted"
    ModelConverter().convert(tiny_model(), target)
    flip_byte(target / "tokenizer" / "tokenizer.json", 50)
    with pytest.raises(errors.CorruptFileError, match=r"tokenizer\.json"):
        ArrowEngine(target)


@pytest.mark.slow
def test_ten_thousand_documents_stay_within_memory(minilm: ArrowEngine) -> None:
    """A promised figure: peak growth below 200 MB."""
    status = Path("/proc/self/status")

    def resident_kb(field: str) -> int:
        return int(
            next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith(field)).split()[1]
        )

    minilm.encode(["warm up"] * 3)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # starts VmHWM anew
    before = resident_kb("VmRSS")
    vectors = minilm.encode([f"Document {i}" for i in range(10_000)])
    assert vectors.shape == (10_000, 384)
    assert resident_kb("VmHWM") - before < 200_000
