"""`bench gpu` and `bench startup` on a tiny model on the CPU, against a vLLM that notes what it is asked."""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from archerfish.bench import gpu, startup
from archerfish.bench.gpu import EngineRun, find_vllm, ratio
from archerfish.bench.gpu_worker import Work, draw_inputs
from archerfish.cli.main import main
from archerfish.store.loader import WeightLoader
from tests.engine.tiny_llama import TINY, VOCAB

FAKE_VLLM = """
import json, os, time
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.0.fake"

def note(**what):
    with (Path(__file__).parents[1] / "asked.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\\n")

class Clock:  # of this process, put on by a millisecond a token
    def __init__(self, real):
        self.real, self.ahead_s = real, 0.0

    def __call__(self):
        return self.real() + self.ahead_s

time.perf_counter = Clock(time.perf_counter)

class SamplingParams:
    def __init__(self, **given):
        self.given = given

class LLM:
    def __init__(self, model, **options):
        print("a library that prints")
        config = json.loads((Path(model) / "config.json").read_text())
        variables = {name: os.environ[name] for name in os.environ if name.startswith("VLLM_")}
        note(options=options, config=config, variables=variables, caches=os.environ.get("TRITON_CACHE_DIR", ""))

    def generate(self, prompts, params, use_tqdm):
        each = params if isinstance(params, list) else [params] * len(prompts)
        note(prompts=[prompt["prompt_token_ids"] for prompt in prompts], params=[one.given for one in each])
        time.perf_counter.ahead_s += 0.001 * max(one.given["max_tokens"] for one in each)
        lengths = [one.given["max_tokens"] - (FAULT == one.given["max_tokens"]) for one in each]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * length)]) for length in lengths]

FAULT = -1
"""
WORK = Work(
    max_token=VOCAB - 1, num_requests=6, least_tokens=3, most_tokens=12, single_prompt=8, single_output=9, num_prefills=3,
    prefill_tokens=20, prefix_tokens=32, num_shared=4, own_tokens=5, shared_output=6,
)  # fmt: skip
KEYS = ("offline256_tok_s", "bs1_decode_tok_s", "bs1_ttft_ms", "prefill_tok_s", "shared_prefix_req_s", "import_s", "start_s")


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    return tmp_path / "site"


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "max_cache_tokens": 2048, "num_threads": 1}
    monkeypatch.setitem(gpu.SHAPES, "tiny", TINY)
    monkeypatch.setitem(gpu.OPTIONS, gpu.OURS, options)
    monkeypatch.setattr(gpu, "WORK", WORK)


def asked(vllm: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (vllm / "asked.jsonl").read_text().splitlines()]


def test_the_work_is_that_of_the_peers_script() -> None:
    found = draw_inputs(Work(), 1)
    everything = [found.offline, found.offline_outputs, found.first, found.single, found.prefills, found.prefix, found.shared]
    digest = hashlib.sha256(json.dumps(everything).encode()).hexdigest()
    assert digest == "ee6e94e920af59da5fc44d4014c4e526b2ec88f48dc7a08c000fb073060ef804"


@pytest.mark.usefixtures("_tiny")
def test_both_engines_do_the_same_work(vllm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.json"
    arguments = ["bench", "gpu", "--shapes", "tiny", "--repeats", "2", "--vllm-path", str(vllm), "--output", str(output)]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    found = json.loads(output.read_text())["shapes"]["tiny"]
    assert "tiny, vllm: shared_prefix_req_s: " in shown.err and len(shown.err.splitlines()) == 2 * (2 + 2 * 5)
    ours, theirs = found["archerfish"], found["vllm"]
    for key in KEYS:
        assert ours[key] == pytest.approx(statistics.median(ours[f"{key}_all"]), abs=1e-3) and ours[key] > 0
        assert len(ours[f"{key}_all"]) == len(theirs[f"{key}_all"]) == (1 if key in ("import_s", "start_s") else 2)
        higher = found["ratios"][key] == pytest.approx(ours[key] / theirs[key], rel=0.05)
        assert higher is not key.endswith(("_ms", "import_s", "start_s")) and f"\n{key} " in shown.out
    assert theirs["version"] == "0.0.fake" and theirs["error"] == ours["error"] == ""
    start, *calls = asked(vllm)
    assert start["config"] == TINY and start["options"] == gpu.OPTIONS[gpu.THEIRS]
    assert start["variables"] == {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    assert [len(call["prompts"]) for call in calls] == [1, *[6, 1, 1, 3, 1, 4] * 2]
    assert {call["params"][0]["temperature"] for call in calls[2:5]} == {0.0} and calls[1]["params"][0]["temperature"] == 0.6
    inputs = draw_inputs(WORK, 1)
    assert [call["prompts"] for call in calls[7:]] == [
        inputs.offline, [inputs.first], [inputs.single], inputs.prefills, [[*inputs.prefix, 5]], inputs.shared,
    ]  # fmt: skip


@pytest.mark.usefixtures("_tiny")
def test_a_part_alone_has_the_same_prompts_and_a_peer_that_fails_is_named(
    vllm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = vllm / "vllm" / "__init__.py"
    fake.write_text(fake.read_text().replace("FAULT = -1", f"FAULT = {WORK.shared_output}"))
    arguments = ["bench", "gpu", "--shapes", "tiny", "--repeats", "1", "--only", "shared,bs1", "--vllm-path", str(vllm)]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["shapes"]["tiny"]
    assert {key for key in KEYS if key in found["archerfish"]} == set(KEYS) - {"offline256_tok_s", "prefill_tok_s"}
    inputs = draw_inputs(WORK, 0)
    prompts = [call["prompts"] for call in asked(vllm)[2:]]
    assert prompts == [[inputs.first], [inputs.single], [[*inputs.prefix, 5]], inputs.shared]
    assert found["vllm"]["error"].startswith("RuntimeError: 24 tokens were asked for, 20 came (gpu_worker.py:")
    assert found["ratios"]["bs1_ttft_ms"] > 0 and found["ratios"]["shared_prefix_req_s"] is None


@pytest.mark.usefixtures("_tiny")
def test_a_failure_of_ours_is_told_and_is_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.SHAPES, "tiny", {**TINY, "model_type": "unheard-of"})
    assert main(["bench", "gpu", "--shapes", "tiny", "--no-peers"]) == 1
    assert "archerfish: failed (UnsupportedModelError" in capsys.readouterr().out


@pytest.mark.usefixtures("_tiny")
def test_startup_writes_a_store_once_and_starts_twice(
    vllm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, output = tmp_path / "stores", tmp_path / "report.json"
    arguments = ["bench", "startup", "--shapes", "tiny", "--vllm-path", str(vllm), "--scratch", str(stores)]
    assert main([*arguments, "--output", str(output)]) == 0
    assert capsys.readouterr().out.count("tiny") == 4
    starts = json.loads(output.read_text())["starts"]
    names = [(start["engine"], start["start"]) for start in starts]
    assert names == [(engine, start) for engine in ("archerfish", "vllm") for start in ("first", "second")]
    for start in starts:
        phases = [start[name] for name in ("process_s", "import_s", "load_s", "first_token_s")]
        assert min(phases) > 0 and sum(phases) == pytest.approx(start["total_s"])
    first, _, second, _ = asked(vllm)
    assert first["caches"] == second["caches"] != "" and not Path(first["caches"]).exists()
    with WeightLoader(stores / "tiny-float32-random") as loader:
        loader.verify()
        assert loader.config == TINY
        assert loader.get_shape("model.layers.1.mlp.down_proj.weight") == (32, 64)
        assert torch.std(loader.get_layer("lm_head.weight")) > 0
    monkeypatch.delattr(startup, "WorkerProcess")
    assert startup.ensure_store("tiny", stores) == stores / "tiny-float32-random"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["gpu", "startup"])
def test_a_machine_without_cuda_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", command, "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "DeviceError"


@pytest.mark.parametrize(
    "flags", [("--repeats", "0"), ("--shapes", "qwen3"), ("--only", "ofline"), ("--vllm-path", "/nowhere")], ids=lambda f: f[0]
)
def test_mistaken_flags_are_refused(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", *flags, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "InvalidOptionError"


def test_vllm_is_looked_for(monkeypatch: pytest.MonkeyPatch, vllm: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (find_vllm(""), find_vllm(str(vllm))) == ("", str(vllm))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert find_vllm("") == "installed"


def test_no_ratio_without_both_sides() -> None:
    metric = gpu.METRICS[0]
    ours = EngineRun("archerfish", "tiny", {metric.key: [2.0, 4.0, 3.0]})
    assert ratio({"archerfish": ours}, metric) is None
    assert ratio({"archerfish": ours, "vllm": EngineRun("vllm", "tiny")}, metric) is None
    assert ratio({"archerfish": ours, "vllm": EngineRun("vllm", "tiny", {metric.key: [1.5]})}, metric) == 2.0
