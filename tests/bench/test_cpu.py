"""`bench cpu` on tiny models, with its engines in this process."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from archerfish.bench import cpu, cpu_peers, embed, engines
from archerfish.bench.worker import EngineGroup, WorkerError
from archerfish.config import HubConfig
from archerfish.errors import InvalidOptionError, UnknownOptionError
from tests.bench.test_benches import FakeEmbeddings, InProcess, report_of, set_sizes
from tests.engine.tiny_llama import VOCAB


class FakeLlama(engines.TextEngine):
    def __init__(self, **_: Any) -> None:
        self.start = dict  # type: ignore[method-assign]

    def run(self, prompts: list[list[int]], outputs: list[int], temperature: float, **others: Any) -> list[int]:
        return outputs

    def token_times(self, prompt: list[int], num_output: int) -> list[float]:
        return [0.1]


def options(**changes: Any) -> Namespace:
    usual = {"rounds": 1, "only": "", "engines": "", "against": "", "llama_server": "", "hub": HubConfig()}
    return Namespace(**{**usual, **changes})


def test_cpu_measures_ours_and_names_absent_peers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.bench.worker.Worker", InProcess)
    made = {"LlamaCpp": FakeLlama, "ArcherfishVectors": FakeEmbeddings, "SentenceTransformers": FakeEmbeddings}
    for name, engine in {**made, "Roofline": cpu_peers.Roofline}.items():
        monkeypatch.setattr(engines, name, engine, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "vllm" else name)
    monkeypatch.setattr(cpu.CpuBench, "text_file", llama)
    decodes = {1: ("decode, tokens/s", 3), 8: ("8 sequences, tokens/s", 2)}
    set_sizes(monkeypatch, cpu, DECODES=decodes, MAX_TOKEN=VOCAB, NUM_DRAWS=2)
    set_sizes(monkeypatch, cpu, OUR_OPTIONS={"dtype": "float32", "load_format": "dummy", "num_threads": 1}, NUM_TEXTS=2)
    set_sizes(monkeypatch, cpu, RWKV_SHAPES=("tiny",), RWKV_STREAMS=2, RWKV_OUTPUT=2, PREFILL_TOKENS=16)
    set_sizes(monkeypatch, embed, SETTLE_S=0.0, MIN_SECONDS=0.0, NUM_CALLS=2)
    wanted = "archerfish,llama.cpp,vllm,st-float32,package rwkv,numpy sort"
    report = report_of(cpu.measure(options(only="decode,prefill,batch,start,embed,rwkv,draw", engines=wanted)))
    assert report.notes == ["vllm was not measured: not installed: vllm"]
    judged = {result.name for result in report.judge(cpu.GOALS)}
    assert {"process to first token, s: times llama.cpp", "one draw, us: times numpy sort"} < judged
    both = ("8 sequences, tokens/s", "prefill, tokens/s", "decode, share of the limit", "process to first token, s")
    assert all(list(report.samples[metric]) == ["archerfish", "llama.cpp"] for metric in both)
    assert {"rwkv tiny, 2 streams, tokens/s", "embed, one text p50, ms", "machine: GB/s from memory"} < set(report.samples)


def test_without_the_native_module_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archerfish.bench.worker.Worker", InProcess)
    monkeypatch.setattr(engines, "Roofline", cpu_peers.Roofline, raising=False)
    monkeypatch.setattr(cpu_peers.Roofline, "peaks", MagicMock(side_effect=WorkerError("not compiled")))
    bench = cpu.CpuBench(options(), [])
    assert [str(note).partition(":")[0] for note in bench.roofline()] == ["machine failed"]
    monkeypatch.setattr(cpu, "decode_rate", lambda *_: 5.0)
    group = MagicMock(EngineGroup, names=lambda _: ["x"])
    assert [one.metric for one in bench.decode_round(group, [1], 0)] == ["decode, tokens/s"]


def test_decode_rate_leaves_the_prompt_out_and_asks_for_prompts_that_no_cache_has() -> None:
    group = MagicMock(EngineGroup)
    group.call.side_effect = [1.0, 3.0, 1.0, None]
    assert cpu.decode_rate(group, "x", 2, 10, 0) == 2 * 10 / 2
    first, second = (call.kwargs for call in group.call.call_args_list)
    assert first["outputs"] == [1, 1] and second["outputs"] == [11, 11] and first["prompts"] != second["prompts"]
    assert cpu.decode_rate(group, "x", 2, 10, 0) is None


def test_servers_and_parts_that_do_not_exist_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.CpuBench, "text_file", tmp_path / "model.gguf")
    given = options(llama_server=sys.executable, against=str(tmp_path))
    commands = cpu.CpuBench(given, ["archerfish", "llama.cpp"]).server_commands()
    assert list(commands) == ["archerfish", tmp_path.name, "llama.cpp"] and commands["llama.cpp"][1][0] == sys.executable
    assert commands[tmp_path.name][1][1].startswith(f"PYTHONPATH={tmp_path}:")
    with pytest.raises(InvalidOptionError, match="cannot be run"):
        cpu.CpuBench(options(llama_server="/no/such/file"), []).server_commands()
    with pytest.raises(UnknownOptionError, match="Unknown name in --only"):
        list(cpu.measure(options(only="decodes")))


def test_plain_draw_keeps_top_k_and_top_p() -> None:
    row, draw = np.log(np.array([0.1, 0.5, 0.3, 0.1], np.float32)), np.random.default_rng(1)
    drawn = {cpu.draw_sorted(row, draw, temperature=1.0, top_k=3, top_p=0.7) for _ in range(50)}
    assert drawn == {1, 2}


def test_vectors_of_an_exported_model_are_in_the_order_of_the_texts() -> None:
    class Lengths(cpu_peers.ExportedModel):
        tokenizer = SimpleNamespace(encode_batch=lambda texts: [SimpleNamespace(ids=[7] * len(text)) for text in texts])

        def infer(self, batches: list[dict[str, Any]]) -> list[Any]:
            return [batch["attention_mask"].sum(1, keepdims=True) for batch in batches]

    assert Lengths(source="", cache_dir="", options={}).encode(["abc", "a", "abcd"], 2).tolist() == [[3], [1], [4]]
