"""The arithmetic, the texts and the process protocol of the benchmarks, without any real engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from archerfish.bench import report
from archerfish.bench.driver import PeerFailedError, WorkerProcess
from archerfish.bench.embed import Effort, EmbedBench, EngineResult, make_texts
from archerfish.bench.memory import mapped_resident_bytes, reset_peak, status_bytes
from archerfish.bench.peers import ENGINES, PeerOptions
from archerfish.bench.stats import Summary, gain, percentile, summarize
from archerfish.bench.store import run_store_bench
from archerfish.bench.texts import PROBES, TextMaker, documents
from archerfish.errors import UnsupportedModelError

FAST = Effort(
    rounds=2, min_seconds=0, calls=5, num_documents=10, document_rounds=1, settle_s=0, sample_documents=True
)
FAKE_WORKER = """
import os, sys
import numpy as np
from archerfish.bench.worker import Worker, serve_requests

class Fake:
    name, batch_sizes = "fake", (32, 64)
    def __init__(self, mode): self.mode, self.calls = mode, 0
    def imports(self):
        if self.mode == "broken": raise ImportError("no such library")
        return "1.2"
    def load(self): pass
    def encode(self, texts, batch_size):
        self.calls += 1
        if self.mode == "crash" and self.calls > 5:
            print("terrible things", file=sys.stderr, flush=True)
            os._exit(7)
        return np.array([[1.0 + len(text), 2.0] for text in texts], np.float32)
    def weight_bytes(self): return {"packed": 5, "mapped": 6}

serve_requests(Worker(Fake(sys.argv[1])), sys.stdin, sys.stdout)
"""


def launch(mode: str) -> WorkerProcess:
    return WorkerProcess([sys.executable, "-c", FAKE_WORKER, mode], timeout_s=60)


def word_tokenizer(num_words: int = 400) -> Tokenizer:
    letters = "abcdefghij"
    words = [f"w{letters[i // 100]}{letters[i // 10 % 10]}{letters[i % 10]}" for i in range(num_words)]
    vocabulary = {word: index for index, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "##ab", "X1", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.post_processor = template
    tokenizer.enable_truncation(20)
    tokenizer.enable_padding(length=20)
    return tokenizer


def test_texts_have_exactly_the_tokens_asked_for(tmp_path: Path) -> None:
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    texts = make_texts(TextMaker.from_directory(tmp_path), Effort(num_texts=(50, 20, 30)))
    plain = word_tokenizer()
    plain.no_truncation()
    plain.no_padding()
    counts = {key: [len(encoding.ids) for encoding in plain.encode_batch(items)] for key, items in texts.items()}
    assert counts["short"] == [10] * 50 and counts["fixed"] == [128] * 20
    assert len(counts["mixed"]) == 30 and 5 <= min(counts["mixed"]) < 100 < max(counts["mixed"]) <= 256
    for items in texts.values():
        assert len(set(items)) == len(items)
    assert make_texts(TextMaker(word_tokenizer()), Effort(num_texts=(50, 20, 30))) == texts, "the seed must fix the texts"


def test_a_tokenizer_with_few_words_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="too few"):
        TextMaker(word_tokenizer(20))


def test_probes_and_documents() -> None:
    assert "" in PROBES and any(len(text.split()) == 600 for text in PROBES)
    assert documents(3) == ["Document 1", "Document 2", "Document 3"]


def test_arithmetic() -> None:
    assert summarize([3.0, 1.0, 2.0, 10.0, 2.5]) == Summary(2.5, 1.0, 10.0, 5)
    hundred = [float(n) for n in range(1, 101)]
    assert (percentile(hundred, 0.5), percentile(hundred, 0.99), percentile([5.0], 0.99)) == (50, 99, 5)
    assert gain(200, 100, higher_is_better=True) == 2 and gain(0.05, 0.5, higher_is_better=False) == pytest.approx(10)


def result(key: str, **samples: list[float]) -> EngineResult:
    return EngineResult(key, key, samples={name.replace("_at_", "@"): values for name, values in samples.items()})


def test_ratios_are_to_the_best_configuration() -> None:
    results = {
        "archerfish": result("archerfish", load_s=[0.05, 0.04, 0.06], fixed_at_32=[400, 300, 500]),
        "st-float32": result("st-float32", load_s=[0.5, 0.6, 0.7], fixed_at_32=[50, 60, 70], fixed_at_128=[40, 40, 40]),
        "st-bfloat16": result("st-bfloat16", load_s=[0.8, 0.8, 0.8], fixed_at_32=[90, 90, 90], fixed_at_64=[100, 90, 110]),
        "openvino": result("openvino", fixed_at_8=[200, 250, 180]),
    }
    found = report.ratios(results, "archerfish")
    assert found["fixed"] == {"sentence-transformers": pytest.approx(4), "openvino": pytest.approx(2)}
    assert found["load_s"] == {"sentence-transformers": pytest.approx(12), "openvino": None}
    assert results["st-bfloat16"].best("fixed") == (64, Summary(100, 90, 110, 3))
    results["archerfish"].memory["weights"], results["archerfish"].min_cosine = 45, 0.99995
    met = {bar.name: bar.is_met for bar in report.bars(results, "archerfish", 91, "auto")}
    assert met == {
        "load, times faster than sentence-transformers": True,
        "texts/s at 128 tokens, times": True,
        "load after imports, ms": True,
        "weights' memory, share of float32": True,
        "smallest cosine with sentence-transformers fp32": True,
    }
    strict = {bar.name: bar.is_met for bar in report.bars(results, "archerfish", 80, "float32")}
    assert not strict["weights' memory, share of float32"] and not strict["smallest cosine with sentence-transformers fp32"]
    assert report.bars(results, "", 91, "auto") == []
    assert report.caveats(results, "archerfish") == ["3 of 5 rounds"]
    results["st-bfloat16"].state = "failed"
    assert report.caveats(results, "archerfish") == ["without st-bfloat16", "3 of 5 rounds"]
    columns, rows = report.table(results, "archerfish")
    assert all(len(row) == len(columns) for row in rows)
    assert ["texts/s, 128 tokens", "400 (300-500)", "60 (50-70)", "100 (90-110)", "200 (180-250)", "4.00x", "2.00x"] in rows


def test_a_whole_run_over_fake_engines(tmp_path: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    keys = ["good", "crash", "broken", "other"]
    bench = EmbedBench(keys, PeerOptions(""), FAST, launch=launch, progress=lambda *step: steps.append(step))
    results = bench.run({"short": ["a", "b"], "fixed": ["c"], "mixed": ["d"]})
    assert {key: found.state for key, found in results.items()} == {
        "good": "ok", "other": "ok", "crash": "failed", "broken": "failed",
    }  # fmt: skip
    assert results["crash"].reason == "the process ended with 7: terrible things"
    assert results["broken"].reason == "ImportError: no such library"
    good = results["good"]
    assert good.version == "1.2" and good.memory["weights"] == 11
    starts, latencies = ("import_s", "load_s", "first_vector_s"), ("latency_p50_ms", "latency_p99_ms")
    for metric in (*starts, *latencies, "short@32", "fixed@32", "mixed@32"):
        assert len(good.samples[metric]) == FAST.rounds, metric
    assert len(good.samples["documents_s"]) == 1
    assert all(done < total for done, total, _ in steps)
    whole = report.as_json(results, "", 0, "auto", "m")
    assert json.loads(json.dumps(whole))["engines"]["crash"]["state"] == "failed"


def test_engines_agree_with_the_reference() -> None:
    options = PeerOptions("")
    bench = EmbedBench(["st-float32", "good"], options, FAST, launch=lambda key: launch("good"))
    results = bench.run({"short": ["a"], "fixed": ["c"], "mixed": ["d"]})
    assert results["good"].min_cosine == pytest.approx(1)


def test_what_is_not_installed_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    results = EmbedBench(["openvino"], PeerOptions(""), FAST, launch=launch).run({})
    assert (results["openvino"].state, results["openvino"].reason) == ("skipped", "not installed: openvino, transformers")
    monkeypatch.undo()
    assert ENGINES["onnx"].missing("cuda") in ("does not run on cuda", "not installed: onnxruntime, onnx")
    monkeypatch.setattr("archerfish.kernels.torch.cpu.is_available", lambda dtype: dtype != "bfloat16")
    assert ENGINES["st-bfloat16"].missing("cpu") == "this CPU has no products in bfloat16"
    assert ENGINES["st-bfloat16"].missing("cuda") == ENGINES["st-float32"].missing("cpu") == ""


def test_a_worker_that_does_not_answer_is_given_up() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with WorkerProcess(command, timeout_s=0.05) as silent, pytest.raises(PeerFailedError, match="no answer to 'start'"):
        silent.ask("start")


def test_memory_is_read_from_proc(tmp_path: Path) -> None:
    import mmap

    path = tmp_path / "some.bin"
    path.write_bytes(b"x" * 2**20)
    reset_peak()
    assert 0 < status_bytes("VmRSS") <= status_bytes("VmHWM")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        assert sum(memory[::4096]) > 0
        assert mapped_resident_bytes("some.bin") == 2**20
    assert mapped_resident_bytes("some.bin") == 0


def test_the_store_bench_measures_and_cleans_up(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    source, scratch = tmp_path / "source", tmp_path / "scratch"
    source.mkdir()
    scratch.mkdir()
    save_file({"w": torch.ones(64, 64), "b": torch.zeros(7)}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "bert"}')
    found: dict[str, Any] = run_store_bench(source, scratch, rounds=1).as_dict()
    assert found["openings"][0]["name"] == "archerfish (mapped)"
    assert len(found["openings"]) == 4 and all(opening["seconds"]["median"] > 0 for opening in found["openings"])
    assert set(found["conversion_mb_per_s"]) == {"arrow", "arrow, validated", "arrow and parquet, validated"}
    assert list(scratch.iterdir()) == []
