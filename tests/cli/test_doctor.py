"""doctor: its report, its verdicts on faked machines, its exit code."""

from __future__ import annotations

import json
import mmap
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from archerfish import ModelConverter
from archerfish.cli import doctor
from archerfish.cli.main import main
from archerfish.cli.output import Output
from archerfish.config import HubConfig
from archerfish.kernels import select
from archerfish.kernels.cards import Card
from archerfish.kernels.machine import Cpu, Memory, cpu, memory, read_cpu
from archerfish.models.config import Config
from archerfish.models.llama import LlamaModel
from archerfish.store.format import Quantization, TensorInfo
from archerfish.store.metadata import read_metadata
from tests.store.gguf_models import make_tensors, write_gguf
from tests.store.models import flip_byte, write_model

GB = 10**9


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A billion parameters, in a sparse file: 4 GB on paper."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "bert"}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [GB], "data_offsets": [0, 4 * GB]}}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * GB)
    return directory


def test_sizes_and_verdicts(model: Path) -> None:
    found = doctor.measure(str(model), HubConfig())
    assert (found.num_parameters, found.weight_bytes("float32"), found.weight_bytes("bfloat16")) == (GB, 4 * GB, 2 * GB)
    assert found.file_bytes > 4 * GB
    small, full, busy = (Card("", total * GB, free * GB) for total, free in ((8, 7), (80, 1), (80, 1)))
    row = doctor.judge_model(found, Memory(32 * GB, 20 * GB), [small, full])
    assert (row["cpu"], row["gpu"]) == ("fits in any type", "fits")
    row = doctor.judge_model(found, Memory(32 * GB, 3 * GB), [])
    assert row["cpu"].endswith("not in float32") and list(row["fits_cpu"].values()) == [True, False]
    assert row["gpu"] == "no GPU"
    row = doctor.judge_model(found, Memory(32 * GB, GB), [busy])
    assert row["cpu"].startswith("does not fit now: needs 2.5 GB") and row["gpu"].startswith("does not fit now")
    row = doctor.judge_model(found, Memory(2 * GB, GB), [])
    assert row["cpu"].startswith("does not fit: needs 2.5 GB, there are 2.0 GB")


def test_formats_of_layers() -> None:
    """Parts of one product that are stored in different formats stay in them."""
    pytest.importorskip("archerfish.kernels.native._native")
    llama = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    shapes = LlamaModel.noted(Config(llama)).shapes
    blocks = {name: Quantization("Q4_0", 1, 32) for name in shapes if "mlp" in name or "layers.1.self_attn.q" in name}
    tensors = [TensorInfo(name, "float32", shape, blocks.get(name)) for name, shape in shapes.items()]
    found = doctor.ModelSize("tiny", 1000, 4000, config=llama, tensors=tensors).formats("bfloat16")
    assert found == {
        "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj": {"bfloat16": 1, "Q4_0 + bfloat16": 1},
        "self_attn.o_proj": {"bfloat16": 2},
        "mlp.gate_proj, mlp.up_proj": {"Q4_0": 2},
        "mlp.down_proj": {"Q4_0": 2},
        "embed_tokens": {"bfloat16": 1},
    }
    assert doctor.ModelSize("bert", 1000, 4000, config={"model_type": "bert"}, tensors=tensors).formats("float16") == {}


def test_an_architecture_that_is_refused(
    light: None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text('{"model_type": "t5"}')
    assert main(["doctor", str(model), "--cache-dir", str(tmp_path / "cache")]) == 1
    assert "No text generation model for model_type 't5'" in capsys.readouterr().out


def test_files_are_judged_by_what_is_stored_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks stay, on a GPU with wider scales and without those of tables; other types become the one that is computed
    in."""
    pytest.importorskip("archerfish.kernels.native._native")
    monkeypatch.setattr(doctor, "fast_cpu_dtype", lambda: "bfloat16")
    monkeypatch.setattr(doctor, "CPU_OVERHEAD_BYTES", 0)
    monkeypatch.setattr(doctor, "GPU_OVERHEAD_BYTES", 0)
    monkeypatch.setattr(doctor, "kv_tokens", lambda *_: None)  # asks the card
    for kind, expected, num_bytes in (("F16", "bfloat16", 2.0), ("Q8_0", "Q8_0", 34 / 32)):
        file = write_gguf(tmp_path / f"{kind}.gguf", "llama", make_tensors("llama"), kind)
        found = doctor.measure(str(file), HubConfig())
        assert {name for counts in found.formats("bfloat16").values() for name in counts} == {expected}
        free = [int(found.num_parameters * each * num_bytes) for each in (0.9, 1.2)]
        on_gpu = found.gpu_bytes or found.weight_bytes("bfloat16")
        assert found.block_bytes <= on_gpu <= found.weight_bytes("bfloat16")
        cards = [Card("", GB, int(on_gpu * each)) for each in (0.9, 1.2)]
        rows = [doctor.judge_model(found, Memory(GB, each), [card]) for each, card in zip(free, cards, strict=True)]
        assert (
            [row["fits_cpu"]["bfloat16"] for row in rows]
            == [row["fits_gpu"]["bfloat16"] for row in rows]
            == [False, True]
        )


def test_kv_tokens(model: Path) -> None:
    llama = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    }
    found = doctor.ModelSize("tiny", 1000, 4000, config=llama)
    wide = doctor.ModelSize("wide", 1000, 4000, config=llama | {"num_key_value_heads": 4})
    tokens = doctor.kv_tokens(found, "cpu", "float32")
    assert tokens is not None and tokens > 1000
    assert doctor.kv_tokens(wide, "cpu", "float32") == pytest.approx(tokens / 2, rel=0.05)
    assert doctor.kv_tokens(doctor.measure(str(model), HubConfig()), "cpu", "float32") is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_tokens_use_the_default_dtype(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "fast_cpu_dtype", lambda: dtype)
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(doctor, "kv_tokens", lambda found, device, dtype: asked.append((device, dtype)))
    found = doctor.ModelSize("tiny", 1000, 4000)
    doctor.judge_model(found, Memory(GB, GB), [])
    doctor.judge_model(found, Memory(GB, GB), [Card("card", GB, GB)])
    assert asked == [("cpu", dtype), ("cuda", "bfloat16")]


def test_missing_and_damaged_models_are_reported(model: Path, tmp_path: Path) -> None:
    hub = HubConfig(cache_dir=str(tmp_path))
    builtin = doctor.measure("all-minilm-l6-v2", hub)
    assert (builtin.num_parameters, builtin.remark) == (22_713_216, "not pulled yet")
    elsewhere = doctor.measure("some-org/some-model-that-nobody-has", hub)
    assert elsewhere.num_parameters == 0 and "archerfish pull" in elsewhere.remark
    assert doctor.judge_model(elsewhere, Memory(GB, GB), [])["cpu"] == "unknown"
    (model / "model.safetensors").write_bytes(b"short")
    damaged = doctor.measure_or_explain(str(model), hub)
    assert damaged.num_parameters == 0 and "model.safetensors" in damaged.remark


V2 = {"memory.max": 4 * GB, "memory.current": 3 * GB, "memory.stat": f"anon 5\ninactive_file {GB}\n"}
V1 = {"memory.limit_in_bytes": 4 * GB, "memory.usage_in_bytes": 3 * GB, "memory.stat": f"total_inactive_file {GB}\n"}


@pytest.mark.parametrize(
    ("line", "folder", "files"), [("0::/box/inner", "box", V2), ("5:cpu,cpuacct:/x\n4:memory:/box", "memory/box", V1)]
)
def test_memory_limit_of_a_cgroup(line: str, folder: str, files: dict[str, object], tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:    8000000 kB\n")
    (proc / "self" / "cgroup").write_text(f"{line}\n")
    assert memory(proc, cgroup) == Memory(16_000_000 * 1024, 8_000_000 * 1024)
    (cgroup / folder / "inner").mkdir(parents=True)
    (cgroup / folder / "inner" / "memory.max").write_text("max")
    for name, content in files.items():
        (cgroup / folder / name).write_text(str(content))
    assert memory(proc, cgroup) == Memory(4 * GB, 2 * GB, "cgroup")
    (proc / "self" / "limits").write_text(
        f"Limit  Soft Limit  Hard Limit\nMax address space         {3 * GB}   unlimited   bytes\n"
    )
    (proc / "self" / "statm").write_text("500000 1 1 1 0 1 0")
    assert memory(proc, cgroup) == Memory(3 * GB, 3 * GB - 500_000 * mmap.PAGESIZE, "ulimit -v")


def test_arm_processor_name_and_features(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nFeatures\t: asimd asimdhp bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n")
    assert read_cpu(info)[0] == "ARM Neoverse-V1"
    info.write_text("Features\t: asimd\nCPU implementer\t: 0x61\nCPU part\t: 0x022\n")
    model, flags = read_cpu(info)
    assert (model, flags) == ("ARM, implementer 0x61, part 0x022", frozenset({"asimd"}))
    assert doctor.describe_cpu(Cpu(model, flags, 2))["features"] == {
        "NEON": True,
        "SVE": False,
        "BF16": False,
        "I8MM": False,
    }
    info.write_text("model name\t: Some CPU\nflags\t\t: avx2\n")
    assert read_cpu(info) == ("Some CPU", frozenset({"avx2"}))


def test_a_backend_that_was_not_compiled_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "native_error", lambda: "there was no compiler")
    reasons = {path.name: path.reason for path in select.fast_paths() if not path.is_on}
    assert reasons["backend native"] == "there was no compiler"
    assert select.choose_backend("cpu", select.choose_dtype("auto", "cpu")).name == "torch reference"


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_cards", lambda: ([Card("Fake GPU", 80 * GB, 79 * GB)], ""))
    paths = [select.FastPath("AMX", True, "it has it"), select.FastPath("CUDA", False, "it has none")]
    monkeypatch.setattr(doctor, "fast_paths", lambda: paths)


def test_report(light: None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = ["--cache-dir", str(tmp_path / "cache")]
    assert main(["doctor", str(model), *cache]) == 0
    shown = capsys.readouterr().out
    names = {"NEON", "SVE", "BF16", "I8MM"} if "asimd" in cpu().flags else {"AVX2", "AVX-512", "AVX512-BF16", "AMX"}
    words = ("cores", *names, "Fake GPU", "cc:", "torch", "it has none", "all-minilm-l6-v2", "memory", "Ready.")
    for word in (*words, str(tmp_path / "cache"), str(model)):
        assert word in shown
    assert main(["doctor", str(model), *cache, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["usable"] is True and body["problems"] == []
    assert set(body["cpu"]["features"]) == names
    assert len(body["peaks"]) == 3 and min(body["peaks"].values()) > 0
    builtin = {"all-minilm-l6-v2", "smollm2-135m-instruct", "story-rwkv7"}
    assert {entry["name"] for entry in body["models"]} == {*builtin, str(model)}
    [story] = [entry for entry in body["models"] if entry["name"] == "story-rwkv7"]
    assert (story["num_parameters"], story["remark"]) == (
        6_230_784,
        "safetensors",
    )  # not pulled; a norm of 512 is in its table


def test_report_imports_no_torch(tmp_path: Path) -> None:
    """Importing it takes seconds. A model of every kind of file is measured."""
    write_model(tmp_path / "model")
    command = f"main(['doctor', {str(tmp_path / 'model')!r}])"
    code = f"import sys; from archerfish.cli.main import main; {command}; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "backend native" in shown and "smollm2-135m-instruct" in shown and shown.endswith("Ready.\nFalse\n")


def test_missing_package_is_a_problem(
    light: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = [
        {"name": name, "version": "", "needed_for": extra} for name, extra in (("torch", ""), ("fastapi", "serve"))
    ]
    monkeypatch.setattr(doctor, "find_packages", lambda: found)
    assert main(["doctor", "--cache-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "The package torch is missing" in shown and "fastapi is missing" not in shown


def test_packages_come_from_the_metadata() -> None:
    found = {package["name"]: package for package in doctor.find_packages()}
    assert found["numpy"]["version"] and not found["numpy"]["needed_for"]
    assert found["torch"]["needed_for"] == "torch"  # the extra's name
    assert found["openvino"]["needed_for"] == "bench" and "ruff" not in found


def test_unknown_path_is_refused(light: None, tmp_path: Path) -> None:
    assert main(["doctor", "/no/such/model", "--cache-dir", str(tmp_path)]) == 3


def test_damaged_converted_directory_is_a_problem(tmp_path: Path) -> None:
    """A load checks a sample; doctor reads every byte."""
    target = tmp_path / "converted"
    ModelConverter().convert(write_model(tmp_path / "source"), target)
    assert doctor.find_damage(str(target), Output(quiet=True)) == []
    flip_byte(target / "weights.arrow", read_metadata(target).files["weights.arrow"].spans[0][0].offset)
    [problem] = doctor.find_damage(str(target), Output(quiet=True))
    assert "weights.arrow was altered" in problem and "'embeddings.word_embeddings.weight'" in problem
