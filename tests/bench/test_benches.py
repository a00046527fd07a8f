"""The benches, with few rounds of tiny models."""

from __future__ import annotations

import hashlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock, call

import numpy as np
import pytest

from archerfish.bench import cpu, cpu_peers, embed, engines, generate, gpu, kernels, replicas, rwkv, scheduler, store
from archerfish.bench.report import BenchReport, Found
from archerfish.bench.worker import EngineGroup, WorkerError
from archerfish.cli.main import main
from archerfish.config import EmbedConfig, EngineConfig, HubConfig
from archerfish.errors import InvalidOptionError, UnknownOptionError, UnsupportedModelError
from archerfish.kernels.torch.reference import TorchOps
from tests.cache.invariants import check_cache
from tests.engine.tiny_llama import VOCAB, tiny_config
from tests.store.models import write_model


class InProcess:
    """Stands in for a Worker: the engine is an object of this process, but still called through JSON."""

    started: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __init__(self, engine: str, arguments: dict[str, Any], **options: Any) -> None:
        InProcess.started.append((engine, {**arguments, **options}))
        self.engine = engine
        self.made = getattr(engines, engine, Failing)(**json.loads(json.dumps(arguments)))

    def call(self, method: str, **arguments: Any) -> Any:
        answer = json.loads(
            json.dumps(engines.answer(self.made, json.dumps({"method": method, "arguments": arguments})))
        )
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        if hasattr(self.made, "engine"):
            self.made.engine.close()


class Failing(engines.Engine):
    def __init__(self, **_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    InProcess.started = []
    monkeypatch.setattr("archerfish.bench.worker.Worker", InProcess)


def report_of(found: Found) -> BenchReport:
    report = BenchReport("test")
    for one in found:
        report.add(one)
    return report


def generation(directory: Path, **changes: Any) -> Namespace:
    return Namespace(**{"rounds": 2, "no_peers": True, "against": "", "engine": tiny_config(directory), **changes})


def set_sizes(monkeypatch: pytest.MonkeyPatch, module: Any, **sizes: Any) -> None:
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)


def test_throughput_measures_both_kinds_of_batching(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, generate, MAX_PROMPT=24, MAX_OUTPUT=8)
    report = report_of(generate.throughput(generation(llama, batches=(2, 3), rounds=1)))
    for batch in (2, 3):
        for kind in ("continuous", "static"):
            assert report.summary(f"{kind}, {batch} sequences, tokens/s")
        utilisation = report.summary(f"{batch} sequences, utilisation")
        assert utilisation is not None and 0 < utilisation.median <= 1
    assert [arguments["options"]["max_num_seqs"] for _, arguments in InProcess.started] == [2, 3]


def test_jobs_depend_on_the_seed_alone() -> None:
    jobs = generate.mixed_jobs(200, 50, 3)
    assert jobs == generate.mixed_jobs(200, 50, 3) != generate.mixed_jobs(200, 50, 4)
    assert all(16 <= len(prompt) <= 256 and 4 <= output <= 512 and max(prompt) < 50 for prompt, output in jobs)


def test_latency_measures_another_version_in_the_same_rounds(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, generate, LATENCY_PROMPTS=(4, 8), LATENCY_OUTPUT=3)
    report = report_of(generate.latency(generation(llama, against="/some/before")))
    assert report.engines == ["archerfish", "before"]
    assert [arguments["path"] for _, arguments in InProcess.started] == ["", "/some/before"]
    for engine in report.engines:
        first, rate, gap = (
            report.summary(metric, engine)
            for metric in ("first token after 8 tokens, ms", "after 8 tokens, tokens/s", "gap between tokens p99, ms")
        )
        assert first and rate and gap and (first.rounds, rate.rounds, gap.rounds) == (2, 2, 4)


def test_prefix_cache_is_measured_with_hits_and_repeats(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, generate, SHARED_TOKENS=64, OWN_TOKENS=8, PREFIX_OUTPUT=2, PREFIX_REQUESTS=4)
    report = report_of(generate.prefix(generation(llama, rounds=1)))
    assert report.samples["requests, hit rate"] == {"archerfish": [0.75]}
    assert report.samples["forward passes of an exact repeat"] == {"archerfish": [0]}
    assert report.summary("cache off, requests/s") and report.engines == ["archerfish"]


def test_installed_peers_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = MagicMock(EngineGroup)
    model = tmp_path / "model.gguf"
    model.touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("archerfish.store.names.resolve_model", lambda name: model)
    facts = {"directory": "d", "dtype": "float32", "config": {}}
    for no_peers in (False, True):
        generate.open_peers(group, generation(tmp_path, no_peers=no_peers), facts, is_latency=True)
    assert group.open.call_args_list == [
        call("transformers", "Transformers", {**facts, "num_threads": 1}),
        call("llama.cpp", "LlamaCpp", {"model_path": str(model), "num_threads": 1}),
    ]


def rwkv_options(**changes: Any) -> Namespace:
    engine = EngineConfig(dtype="float32", num_threads=1, memory_budget_gib=0.2)
    usual = {"rounds": 1, "no_peers": True, "against": "", "shape": "tiny", "streams": (1, 2), "engine": engine}
    return Namespace(**{**usual, **changes})


def small_rwkv(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"NUM_STREAMS": 2, "STREAM_OUTPUT": 2, "SHARED_TOKENS": 80, "PREFIX_OUTPUT": 2, "DECODE_OUTPUT": 3}
    set_sizes(monkeypatch, rwkv, **sizes, VOCAB_SIZE=200, COPY_BYTES={"cpu": 1 << 12}, AUDIO_SECONDS=0.1)


@pytest.mark.no_cover
def test_rwkv_keeps_states_without_changing_tokens(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_rwkv(monkeypatch)
    report = report_of(rwkv.rwkv(rwkv_options()))
    same = report.summary("requests with the same tokens, share")
    assert same is not None and same.median == 1.0
    assert {"a state, MB", "one stream, tokens/s", "2 streams, tokens/s", "states kept, requests/s"} < set(
        report.samples
    )
    with pytest.raises(UnsupportedModelError, match="is not a recurrent model"):
        list(rwkv.rwkv(rwkv_options(engine=tiny_config(llama))))


@pytest.mark.no_cover
def test_tts_is_measured_against_the_limit_and_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    small_rwkv(monkeypatch)
    monkeypatch.setattr("archerfish.bench.engines.Archerfish.speech", lambda *_, **__: [2.0, 0.5])
    report = report_of(rwkv.tts(rwkv_options(no_peers=False)))
    assert report.engines == ["archerfish", "package rwkv"]
    figures = {metric: summary.median for metric, summary in report.own_summaries().items()}
    assert figures["one stream, real-time factor"] == 4 and figures["2 at once, streams in real time"] == 0.25
    assert figures["2 streams, share of the limit"] > 0


def test_step_bytes_are_weights_without_embeddings_and_states_twice() -> None:
    facts = {
        "dtype": "bfloat16",
        "vocab_size": 10,
        "config": {"hidden_size": 4},
        "weight_bytes": 1000,
        "block_bytes": 7,
    }
    assert rwkv.step_bytes(facts, 3) == 1000 - 80 + 2 * 3 * 7


def gpu_options(**changes: Any) -> Namespace:
    usual = {
        "repeats": 1,
        "only": "",
        "shapes": "qwen3-0.6b",
        "vllm_path": "",
        "no_peers": False,
        "against": "",
        "scratch": "",
    }
    return Namespace(**{**usual, "hub": HubConfig(), **changes})


def test_gpu_parts_draw_the_same_prompts_whichever_run() -> None:
    asked: list[tuple[list[list[int]], list[int], float]] = []

    def generated(prompts: list[list[int]], outputs: list[int], temperature: float, **others: Any) -> float:
        asked.append((prompts, outputs, temperature))
        assert others in ({}, *(wanted for *_, wanted in gpu.SAMPLING.values()))
        return float(len(asked))

    assert [metric for metric, _ in gpu.run_parts(generated, gpu.SAMPLING, 1)] == [
        gpu.PARTS[part] for part in gpu.SAMPLING
    ]
    found = [(len(prompts), len(prompts[0]), outputs[0]) for prompts, outputs, _ in asked]
    assert found == [(4, 128, 256), *[(128, 128, 256)] * 3, (32, 8192, 256), (256, 2048, 512)]
    long = asked[4]
    asked.clear()
    assert [metric for metric, _ in gpu.run_parts(generated, ["long"], 1)] == [gpu.PARTS["long"]] and asked == [long]
    asked.clear()
    rates = dict(gpu.run_parts(generated, set(gpu.PARTS) - set(gpu.SAMPLING), 1))
    total = sum(asked[0][1])
    assert list(rates.values()) == [total, 2000, 512 / (3 - 2), 64 * 2048 / 4, 256 / 6]
    sizes = [(len(prompts), len(prompts[0])) for prompts, _, _ in asked[1:]]
    assert sizes == [(1, 128), (1, 128), (64, 2048), (1, 3073), (256, 3200)]
    whole, asked = asked, []
    list(gpu.run_parts(generated, ["prefill"], 1))
    assert asked == [whole[3]]
    drawn = json.dumps([[prompts, outputs] for prompts, outputs, _ in whole])
    assert hashlib.sha256(drawn.encode()).hexdigest()[:16] == "5517bfcb420f7e77"  # the draws of the peers' own script


class FakeTextEngine(engines.TextEngine):
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def imports(self) -> str:
        return "0.0"

    def load(self) -> None:
        assert self.options["load_format"] in ("dummy", "auto")

    def run(self, prompts: list[list[int]], outputs: list[int], temperature: float, **others: Any) -> list[int]:
        if self.options["max_num_seqs"] == 1 and len(prompts) > 1:
            raise MemoryError("no memory left")
        return outputs


def test_gpu_bench_compares_with_vllm_and_survives_its_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.setattr("archerfish.kernels.select.choose_device", lambda name: name)
    monkeypatch.setattr(engines, "Archerfish", FakeTextEngine)
    monkeypatch.setattr(engines, "Vllm", FakeTextEngine)
    options = gpu_options(vllm_path=str(tmp_path), only="prefill")
    report = report_of(gpu.measure(options))
    metric = f"qwen3-0.6b: {gpu.PARTS['prefill']}"
    assert report.summary(metric) and report.summary(metric, "vllm")
    ours, theirs = (arguments for _, arguments in InProcess.started)
    assert ours["options"]["device"] == "cuda" and theirs["path"] == str(tmp_path)
    assert theirs["environment"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    monkeypatch.setitem(gpu.VLLM_OPTIONS, "max_num_seqs", 1)
    report = report_of(gpu.measure(options))
    assert any("no memory left" in note for note in report.notes)
    assert report.summary(metric) and not report.summary(metric, "vllm")


@pytest.mark.no_cover
def test_startup_maps_random_weights_that_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    tiny = {**gpu.SHAPES["llama-3.1-8b"], **sizes, "num_key_value_heads": 1, "vocab_size": VOCAB}
    monkeypatch.setitem(gpu.SHAPES, "tiny", tiny)
    monkeypatch.setattr("archerfish.kernels.select.choose_device", lambda name: name)
    changes = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_cache_tokens": 256}
    monkeypatch.setattr(gpu, "OUR_OPTIONS", {**gpu.OUR_OPTIONS, **changes})
    report = report_of(gpu.startup(gpu_options(shapes="tiny", scratch=str(tmp_path))))
    written = (tmp_path / "tiny-bfloat16-random" / "weights.arrow").stat().st_mtime_ns
    assert {f"tiny: {start} start, s" for start in ("first", "second")} < set(report.samples)
    caches = {arguments["environment"]["TRITON_CACHE_DIR"] for _, arguments in InProcess.started}
    assert len(caches) == 1 and len(InProcess.started) == 2
    again = gpu.random_store("tiny", tmp_path)
    assert (again / "weights.arrow").stat().st_mtime_ns == written


def test_gpu_benches_refuse_wrong_options_and_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, said in (
        ({"shapes": "qwen3-0.7b"}, "Unknown name in --shapes"),
        ({"only": "bs2"}, "Unknown name in --only"),
        ({"vllm_path": str(tmp_path)}, "has no vllm package"),
    ):
        with pytest.raises(InvalidOptionError, match=said):
            list(gpu.measure(gpu_options(**changes)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words in (["gpu", "--no-peers"], ["startup"], ["kernels"]):
        assert main(["bench", *words]) == 5


def test_replicas_bench_measures_router_and_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ROUTED": 3,
        "ROUTED_TOKENS": 128,
        "NUM_ROUTED": 4,
        "NUM_NODES": 1000,
        "CHANGES_PER_S": 8,
    }.items():
        monkeypatch.setattr(replicas, name, value)
    report = report_of(replicas.measure(Namespace(only="router,digest", rounds=2)))
    values = {metric.rpartition(": ")[2]: samples["archerfish"] for metric, samples in report.samples.items()}
    assert len(values["a request p50, us"]) == 2
    assert 0 < values["most bytes in a second to a router"][0] < 64_000
    assert values["bytes in a second to a router that knows it"] == [8 * 8]
    with pytest.raises(UnknownOptionError, match="part"):
        list(replicas.measure(Namespace(only="routers", rounds=1)))


@pytest.mark.slow
def test_replicas_bench_runs_paced_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_SHARED": 40, "NUM_REPLICAS": (2,), "NUM_ROUNDS": 1, "OUTPUT_TOKENS": 4}.items():
        monkeypatch.setattr(replicas, name, value)
    report = report_of(replicas.measure(Namespace(only="prefixes,throughput", rounds=1)))
    assert report.samples["2 replicas: throughput / that of one"]["archerfish"][0] > 0
    assert report.samples["shared prefixes, one cache: hit rate"]["archerfish"][0] > 0


def test_scheduler_and_cache_costs_have_the_trees_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 1000, 1001, 2500):
        cache = scheduler.filled_cache(size, 3)
        check_cache(cache, [])
        assert cache.stats().node_count == size and cache.blocks.num_free == 3
    monkeypatch.setattr(scheduler, "LENGTHS", (64,))
    report = report_of(scheduler.measure(Namespace(sequences=4, steps=4, nodes=1000)))
    assert all(summary.median > 0 for summary in report.own_summaries().values())
    wanted = {"plan and commit p99, us", "tree of 1,000 nodes, evict, ns", "prompt of 64 tokens, match a token, ns"}
    assert wanted < set(report.samples)


@pytest.mark.no_cover
def test_store_opens_and_converts(tmp_path: Path) -> None:
    options = Namespace(
        model=str(write_model(tmp_path / "source")), rounds=1, hub=HubConfig(cache_dir=str(tmp_path / "cache"))
    )
    report = report_of(store.measure(options))
    assert report.engines == ["archerfish", "safetensors", "torch.load", "torch.load mmap"]
    assert {"converting to arrow, MB/s", "growth of resident memory, MB"} < set(report.samples)


class FakeEmbeddings(engines.EmbeddingEngine):
    """Vectors from the letters of a text."""

    def imports(self) -> str:
        return "0.0"

    def load(self) -> None:
        pass

    def encode(self, texts: list[str], batch_size: int) -> Any:
        return np.array([[1.0, len(text)] for text in texts], np.float32)


class FakeReference(FakeEmbeddings):
    batch_sizes = (32, 64)


@pytest.mark.no_cover
def test_embed_measures_engines_and_their_agreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ArcherfishEmbeddings", FakeEmbeddings)
    monkeypatch.setattr(engines, "SentenceTransformers", FakeReference)
    set_sizes(monkeypatch, embed, SETTLE_S=0.0, MIN_SECONDS=0.0, NUM_CALLS=2)
    monkeypatch.setattr("archerfish.store.names.resolve_model", lambda name, hub: tmp_path)
    monkeypatch.setitem(embed.PEERS, "openvino-int8", ("OpenVino", {}, ("no_such_package",)))
    options = Namespace(
        engines="archerfish,st-float32,openvino-int8",
        rounds=2,
        documents=20,
        against="",
        embed=EmbedConfig(),
        hub=HubConfig(),
    )
    report = report_of(embed.measure(options))
    assert report.engines == ["archerfish", "st-float32"]
    assert report.notes == ["openvino-int8 was not measured: not installed: no_such_package"]
    cosine, texts = (
        report.summary("smallest cosine with st-float32"),
        report.summary("128 tokens, texts/s", "st-float32"),
    )
    assert cosine and cosine.median == pytest.approx(1) and texts and texts.rounds == 2
    assert {"imports, s", "one text p99, ms", "20 documents in one call, s", "resident after work, MB"} < set(
        report.samples
    )


def test_embed_texts_have_their_lengths_and_are_repeatable() -> None:
    texts = embed.make_texts("cpu")
    assert texts == embed.make_texts("cpu") and len(embed.make_texts("cuda")["10 tokens, texts/s"]) == 16 * 1024
    assert {len(text.split()) for text in texts["128 tokens, texts/s"]} == {126}
    lengths = [len(text.split()) for text in texts["5-256 tokens, texts/s"]]
    assert min(lengths) >= 3 and max(lengths) <= 254


def test_a_batch_over_blocks_for_kernels_shares_its_first_ones() -> None:
    heads = kernels.head_shape()
    batch, kv = kernels.block_batch(TorchOps(), heads, [(1, 40), (1, 33)], num_shared=16)
    tables = batch.block_tables
    assert tables.shape == (2, 3) and tables[0, 0] == tables[1, 0] and tables[0, 1] != tables[1, 1]
    assert kv.keys.shape[0] == 1 + 2 + 2


# `bench cpu` on tiny models, with its engines in this process


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
    assert list(report.samples["one draw, us"]) == ["archerfish", "numpy sort"]
    both = ("8 sequences, tokens/s", "prefill, tokens/s", "decode, share of the limit", "process to first token, s")
    assert all(list(report.samples[metric]) == ["archerfish", "llama.cpp"] for metric in both)
    assert {"rwkv tiny, 2 streams, tokens/s", "embed, one text p50, ms", "machine: GB/s from memory"} < set(
        report.samples
    )


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
    assert (
        list(commands) == ["archerfish", tmp_path.name, "llama.cpp"] and commands["llama.cpp"][1][0] == sys.executable
    )
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
