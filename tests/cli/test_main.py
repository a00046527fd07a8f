"""The command line: errors, output and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archerfish import __version__, errors
from archerfish.background import signals_to
from archerfish.cli import embed as embed_command
from archerfish.cli import output
from archerfish.cli.interrupts import exit_at_next_interrupt, interrupt_once
from archerfish.cli.main import main
from archerfish.cli.models import quality_rows
from archerfish.cli.options import as_flag
from archerfish.cli.serve import MOST_USED
from archerfish.cli.texts import gather_texts
from archerfish.engine import progress
from archerfish.kernels.build import build_info, commit
from tests.engine.fakes import FakeEngine


class Engine(FakeEngine):
    """The parts of ArrowEngine that `embed` uses."""

    load_seconds, outputs = 0.01, ("dense",)

    def encode(
        self, texts: list[str], batch_size: int, show_progress: bool, *, normalize: Any, prompt_name: Any
    ) -> Any:
        return self.encode_batch(texts, normalize)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    fake = Engine()
    monkeypatch.setattr(embed_command, "open_engine", lambda config, hub, out: fake)
    return fake


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(embed_command, "open_engine", fail)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidInputError("m", hint="h"),
        errors.ModelNotFoundError("m"),
        errors.WriteError("m"),
        errors.DeviceError("m"),
        errors.UnreachableError("m"),
        errors.ArcherfishError("m"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_message_hint_and_exit_code(
    error: errors.ArcherfishError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, error)
    assert main(["embed", "x"]) == error.exit_code
    shown = capsys.readouterr()
    assert shown.err == f"Error: m\n{error.hint}\n"
    assert shown.out == ""
    assert main(["embed", "x", "--json"]) == error.exit_code
    body = json.loads(capsys.readouterr().out)["error"]
    assert (body["code"], body["message"], body["hint"]) == (error.code, "m", error.hint)


def test_unexpected_error_shows_traceback_only_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ZeroDivisionError("odd"))
    assert main(["embed", "x"]) == 1
    shown = capsys.readouterr().err
    assert "Unexpected ZeroDivisionError: odd" in shown and "--debug" in shown and "Traceback" not in shown
    assert main(["embed", "x", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_broken_pipe_is_silent() -> None:
    """Of `python -m archerfish`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "archerfish", "--help"], stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["emebd", "x"], 2, "Did you mean 'embed'"),
        (["bench"], 2, "`archerfish bench embed`"),
        (["bench", "embde"], 2, "`archerfish bench embed`"),
        (["--jsno", "embed"], 2, "--json"),
        (["pull"], 2, "pull --list"),
        (["convert", "only-one"], 2, "OUTPUT_DIR"),
        (["embed", "--input", "no-such-file"], 3, "no-such-file"),
        (["embed", "x", "--output", "x.nyp"], 2, ".npy"),
        (["embed", "x", "--output", "no-such-directory/x.npy"], 2, "does not exist"),
        (["embed", "x", "--config", "no-such-file.toml"], 2, "no-such-file.toml"),
    ],
)
def test_wrong_arguments_get_a_hint(
    arguments: list[str], code: int, said: str, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    assert said in capsys.readouterr().err


def test_version_and_overviews(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == main(["embed", "--version"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"archerfish {__version__}") and shown[:4] == shown[4:]
    assert shown[1].startswith("native kernels: ") and shown[2].startswith("torch: ")
    assert main(["--json", "--version"]) == main(["embed", "--json", "--version"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [build_info()] * 2
    assert main([]) == 0
    assert "bench embed" in capsys.readouterr().out
    assert main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("usage: archerfish bench [options]") and "bench gpu" in said and "archerfish doctor" not in said
    )


def test_embed_shows_a_table_and_json(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "a cat", "a dog"]) == 0
    shown = capsys.readouterr()
    assert "a cat" in shown.out and "dimension" in shown.out and "2 texts" in shown.err
    assert main(["--json", "embed", "a cat", "a dog", "--similarity"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["model"], body["dimension"], body["num_texts"], body["tokens"]) == ("fake/engine", 8, 2, [4, 4])
    assert np.allclose(body["embeddings"], engine.encode_batch(["a cat", "a dog"]))
    assert np.allclose(np.diag(body["similarity"]), 1) and np.shape(body["similarity"]) == (2, 2)
    assert main(["embed", "a cat", "a dog", "--similarity", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "1.000" in shown.out and shown.err == ""


def test_embed_reads_files(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, entries = tmp_path / "texts.txt", tmp_path / "texts.jsonl"
    lines.write_text("one\n\ndrei ü\n", encoding="utf-8")
    entries.write_text('{"text": "one", "id": 1}\n\n{"text": "two"}\n', encoding="utf-8")
    assert gather_texts([], str(lines)) == ["one", "", "drei ü"]
    assert gather_texts([], str(entries)) == ["one", "two"]
    assert main(["embed", "zero", "--input", str(entries), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_texts"] == 3
    entries.write_text('{"text": 5}\n', encoding="utf-8")
    with pytest.raises(errors.InvalidInputError, match="Line 1"):
        gather_texts([], str(entries))
    lines.write_bytes(b"\xff\xfe")
    with pytest.raises(errors.InvalidInputError, match="not UTF-8"):
        gather_texts([], str(lines))


def test_embed_writes_files(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as pq

    texts = ["a cat", "两只狗"]
    wanted = engine.encode_batch(texts)
    for suffix in (".npy", ".jsonl", ".parquet"):
        assert main(["embed", *texts, "--output", str(tmp_path / f"x{suffix}"), "--json"]) == 0
        body = json.loads(capsys.readouterr().out)
        assert body["output"].endswith(suffix) and "embeddings" not in body
    assert np.array_equal(np.load(tmp_path / "x.npy"), wanted)
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["text"] for row in rows] == texts and np.allclose([row["embedding"] for row in rows], wanted)
    table = pq.read_table(tmp_path / "x.parquet").to_pydict()
    assert table["text"] == texts and np.allclose(table["embedding"], wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl", "x.npy", "x.parquet"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(b"old")

    def fail(file: Any, *_: object) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(embed_command.WRITERS, ".npy", fail)
    with pytest.raises(errors.WriteError):
        embed_command.write_vectors(path, [], np.zeros((0, 0), np.float32))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_pull_lists_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "--list", "--cache-dir", str(tmp_path), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    names = {model["name"]: model for model in body["models"]}
    assert names["all-minilm-l6-v2"]["path"] is None and names["all-minilm-l6-v2"]["license"]
    story = names["story-rwkv7"]
    assert story["source"] == "builtin" and Path(story["path"], "model.safetensors").is_file()
    assert 12_000_000 < story["bytes"] < 20_000_000 and "MIT" in story["license"]
    assert main(["pull", "story-rwkv7", "--cache-dir", str(tmp_path), "--offline"]) == 0
    assert story["path"] in capsys.readouterr().out
    assert main(["pull", "--list", "--cache-dir", str(tmp_path)]) == 0
    assert "not downloaded" in capsys.readouterr().out
    assert (
        main(["pull", "all-minilm-l6-v2", "--cache-dir", str(tmp_path), "--offline"])
        == errors.UnreachableError.exit_code
    )


def test_sizes_and_durations() -> None:
    sizes = ["0 B", "999 B", "1.0 kB", "45.4 MB", "1.0 GB"]
    assert [progress.size(n) for n in (0, 999, 1000, 45_400_000, 999_900_000)] == sizes
    assert [output.seconds(s) for s in (0.0042, 0.2, 1.354, 90)] == ["4.2 ms", "200 ms", "1.35 s", "1.5 min"]


def test_convert_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from archerfish.store import converter

    def convert(self: converter.ModelConverter, source: str, target: str, **_: Any) -> converter.ConversionResult:
        assert self.config.stored_dtype() == "bfloat16"
        place = Path(target)
        return converter.ConversionResult(
            True, source, place, place / "weights.arrow", None, None, place / "metadata.json", 10, 0.02, 2.0, 0.5, True
        )

    monkeypatch.setattr(converter.ModelConverter, "convert", convert)
    arguments = ["convert", "some-model", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(arguments) == 0
    assert "some-model" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["success"] is True and body["output_dir"] == str(tmp_path / "out")


def test_convert_shows_what_quantising_cost() -> None:
    quality = {
        "text": "of a.txt",
        "num_tokens": 4096,
        "perplexity": 10.0,
        "perplexity_quantised": 10.2,
        "perplexity_change": 0.02,
        "kl_divergence": 0.01,
        "top1_agreement": 0.953,
        "layers": {"layers.0": {"a": 0.01}, "layers.7": {"a": 0.034}},
    }
    rows = dict(quality_rows(quality))
    assert rows["perplexity"] == "10.200, of the original 10.000 (+2.00%)"
    assert rows["largest error"].startswith("3.40% of a product in layers.7")
    assert quality_rows(None) == []


def test_help_of_serve_shows_the_most_used_options_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    first, _, rest = capsys.readouterr().out.partition("The HTTP service [serve]")
    assert all(f"\n  {as_flag(name.partition('.')[2])} " in first for name in MOST_USED if name != "embed.model")
    assert "--embed-model" in first and first.count("\n  --") == len(MOST_USED) and "--zmq-address" in rest


@pytest.mark.parametrize(
    ("module", "package"), [("zmq", "archerfish[serve]"), ("torch", "archerfish[torch]"), ("rich", "rich")]
)
def test_missing_package_names_its_extra(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert main(["embed", "x"]) == errors.MachineError.exit_code
    assert f"Run `pip install '{package}'`." in capsys.readouterr().err
    fail_with(monkeypatch, ModuleNotFoundError("No module named 'of_ours'", name="of_ours"))
    assert main(["embed", "x"]) == 1 and "bug" in capsys.readouterr().err


def test_commit_of_a_package_and_of_a_clone(tmp_path: Path) -> None:
    package = tmp_path / "clone" / "package"
    package.mkdir(parents=True)
    assert commit(package) == ""
    git = ["git", "-C", str(package.parent), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    assert len(commit(package)) >= 7
    (package / "commit.txt").write_text("0123abc\n")
    assert commit(package) == "0123abc"


# A second ctrl-c on the command line: the process ends at once, with status 130, without a word


ROOT = Path(__file__).parents[2]
SCRIPT = """
import atexit, signal, sys
from archerfish.cli import {command}
from archerfish.cli.main import main
from tests.cli.fake_llm import FakeLLM

class Engine(FakeLLM):
    def __exit__(self, *error):
        {closing}

engine = Engine(lambda number: {word} if number == 1 else None)
{command}.open_engine = lambda config, hub, out, adapter="": engine
atexit.register(lambda: {ending})
sys.exit(main(["{command}", "a b c"]))
"""
PRESS = "signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize(
    ("command", "presses", "shown", "told"),
    [
        ("generate", {"word": PRESS}, "echo \n", "Interrupted.\n"),
        ("generate", {"word": PRESS, "closing": PRESS}, "echo \n", ""),
        ("generate", {"closing": PRESS, "ending": PRESS}, "echo a b c\n", "Interrupted.\n"),
        ("chat", {"closing": PRESS, "ending": PRESS}, "echo a b c\n", "Interrupted.\n"),
        ("chat", {"word": f"({PRESS}, {PRESS}, print('still here'))"}, "echo ", "ends the chat.\n"),
    ],
    ids=["first", "during cleanup", "while Python ends", "while Python ends, chat", "during an answer"],
)
def test_interrupts_of_a_command(command: str, presses: dict[str, str], shown: str, told: str) -> None:
    hooks = {"word": "None", "closing": "None", "ending": "None", **presses}
    script = SCRIPT.format(command=command, **hooks)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, input="", check=False
    )
    assert (done.returncode, done.stdout) == (130, shown)
    assert done.stderr.endswith(told) and bool(done.stderr) == bool(told) and "Traceback" not in done.stderr


INTERRUPTED = """
import importlib, signal, sys

class Finder:
    def find_spec(name, *_):
        if name == {module!r}:
            try:
                signal.raise_signal({number})
            except BaseException as error:
                raise ImportError(name) from error  # as the C code of numpy does

sys.meta_path.insert(0, Finder)
sys.argv = ["archerfish", *{words!r}]
sys.exit(getattr(importlib.import_module({home!r}), {function!r})())
"""
LOADING = "archerfish.engine.llm_loading"


@pytest.mark.parametrize(
    ("module", "words", "number", "code"),
    [
        ("archerfish.cli.commands", "generate a", signal.SIGINT, -signal.SIGINT),  # the shell shows 130
        (LOADING, "generate a", signal.SIGINT, 130),
        (LOADING, "chat", signal.SIGINT, 130),
        (LOADING, "serve --port 0 --kinds generation", signal.SIGINT, 130),
        (LOADING, "serve --port 0 --kinds generation", signal.SIGTERM, 143),
    ],
)
def test_signal_during_an_import_ends_the_command(
    module: str, words: str, number: int, code: int, tmp_path: Path
) -> None:
    home, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["archerfish"].split(":")
    script = INTERRUPTED.format(module=module, words=words.split(), number=int(number), home=home, function=function)
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, input="", env=environment, check=False)
    assert (done.returncode, done.stdout) == (code, "") and "Error" not in done.stderr and not [*tmp_path.iterdir()]


def test_handler_is_restored_and_set_in_the_main_thread_only() -> None:
    before = signal.getsignal(signal.SIGINT)

    def enter() -> None:
        with signals_to(interrupt_once, signal.SIGINT):
            exit_at_next_interrupt()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    with signals_to(interrupt_once, signal.SIGINT):
        assert signal.getsignal(signal.SIGINT) is interrupt_once
    assert signal.getsignal(signal.SIGINT) is before
