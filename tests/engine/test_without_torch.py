"""A CPU needs no torch: red if anything on the way of a text or a vector imports it, or others that take long to
import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny_llama import save_tiny_llama
from tests.engine.tiny_rwkv import save_tiny_rwkv

pytest.importorskip("archerfish.kernels.native._native")
CODE = """
import sys

sys.modules["torch"] = None  # as where it is not installed
from archerfish import ArrowEngine, LLMEngine, SamplingParams

params = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, presence_penalty=0.5, logprobs=2, seed=1, ignore_eos=True)
for model in sys.argv[1:]:
    with LLMEngine(model, device="auto", load_format="dummy", memory_budget_gib=0.05) as llm:
        print(len(llm.generate([[5, 6, 7], [8] * 40], params)[1].token_ids))
engine = ArrowEngine("all-minilm-l6-v2")
print(*engine.encode(["a fish"]).shape)
slow = {"asyncio", "email", "importlib.metadata", "jinja2", "pyarrow", "subprocess", "tomllib", "zipfile"}  # to import
assert not slow & set(sys.modules), slow & set(sys.modules)

from archerfish import SentenceTransformer, util
from archerfish.errors import DeviceError

texts = ["a loaf of bread", "a trout in the river", "a small fish"]
vectors = engine.encode(texts)
assert engine.rerank("fish", texts)[0].index == 2 and engine.similarity(vectors, vectors).argmax(1).tolist() == [0, 1, 2]
assert engine.encode(texts, precision="binary").shape == (3, 48)
for scores, pairwise in util.SIMILARITIES.values():
    assert abs(scores(vectors, vectors).diagonal() - pairwise(vectors, vectors)).max() < 1e-5
    assert scores(vectors[:0], vectors).shape == (0, 3)
    assert [found[0]["corpus_id"] for found in util.semantic_search(vectors, vectors, corpus_chunk_size=2)] == [0, 1, 2]
engine._compute = None  # refusals come first
for call in (
    lambda: engine.tokenizer.encode(texts), lambda: SentenceTransformer.device.fget(engine),
    lambda: engine.encode(texts, convert_to_tensor=True), lambda: engine.encode(texts, convert_to_numpy=False),
    lambda: engine.encode(texts, output_value="token_embeddings"), lambda: engine.encode(texts, output_value=None),
):
    try:
        call()
    except DeviceError:
        print("refused")
"""


def test_text_and_vectors(tmp_path: Path) -> None:
    models = [tmp_path / "llama", tmp_path / "rwkv"]
    for model, save in zip(models, (save_tiny_llama, save_tiny_rwkv), strict=True):
        model.mkdir()
        save(model)
    found = subprocess.run([sys.executable, "-c", CODE, *map(str, models)], capture_output=True, text=True)
    assert found.stdout.split() == ["4", "4", "1", "384", *["refused"] * 6], found.stderr
