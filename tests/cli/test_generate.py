"""The commands generate and tts."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from archerfish.cli import generate, options
from archerfish.cli.main import main
from archerfish.cli.options import Parser
from archerfish.cli.output import Output, printable
from archerfish.engine.tts import VOCAB_SIZE
from archerfish.errors import DeviceError
from archerfish.params import SamplingParams
from tests.cli.fake_llm import FakeLLM
from tests.engine.tiny_rwkv import save_tiny_rwkv
from tests.models.adapter_files import random_adapter


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    monkeypatch.setattr(generate, "open_engine", lambda config, hub, out, adapter="": fake)
    return fake


def test_prompts_to_texts(engine: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one two"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "echo one two\n" and "fake/llm: 2 prompt tokens" in shown.err
    assert engine.is_closed and engine.params[0].max_tokens == 128
    assert main(["generate", "one", "two", "--quiet"]) == 0
    assert capsys.readouterr().out == "=== prompt 1 of 2: one ===\necho one\n\n=== prompt 2 of 2: two ===\necho two\n"


def test_flags_win_over_the_defaults_of_the_model(engine: FakeLLM) -> None:
    engine.facts.default_sampling = {"temperature": 0.0, "top_k": 7}
    for flags in ([], ["--temperature", "0.5"], ["--n", "2"]):
        assert main(["generate", "one", "--quiet", *flags]) == 0
    assert [(params.temperature, params.top_k) for params in engine.params] == [(0.0, 7), (0.5, 7), (1.0, 7)]


def test_adapters_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By directory, and by a name of --lora-modules; one that is loaded and not used is remarked."""
    folder = random_adapter(
        tmp_path / "much", {f"model.layers.{i}.mlp.gate_proj": (1536, 576) for i in range(30)}, std=0.1
    )
    modules = ["--lora-modules", f"mine={folder}"]
    texts, remarks = [], []
    for flags in ([], modules, ["--adapter", str(folder)], [*modules, "--adapter", "mine"]):
        assert (
            main(["generate", "Once upon a", "--max-tokens", "6", "--temperature", "0", "--dtype", "float32", *flags])
            == 0
        )
        shown = capsys.readouterr()
        texts.append(shown.out)
        remarks.append("none is used: add --adapter" in shown.err)
    assert texts[0] == texts[1] != texts[2] == texts[3] and remarks == [False, True, False, False]
    assert main(["generate", "Once", "--adapter", "other"]) == 3 and "no adapter 'other'" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()  # not what the name stands for
    monkeypatch.chdir(tmp_path)
    assert (
        main(["generate", "Once upon a", "--max-tokens", "6", "--dtype", "float32", *modules, "--adapter", "mine"]) == 0
    )
    (folder / "adapter_config.json").write_text("{")
    assert (
        main(["chat", "hello", "--adapter", str(folder)]) == 2 and "Copy or save the adapter" in capsys.readouterr().err
    )


def test_headings_of_several_answers(
    engine: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "one", "--n", "2", "--quiet"]) == 0
    assert capsys.readouterr().out == "=== answer 1 of 2: one ===\necho one\n\n=== answer 2 of 2: one ===\necho one\n"
    assert main(["generate", "one", "two " * 40, "--n", "2", "--quiet"]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("===")]
    assert headings[0] == "=== prompt 1 of 2, answer 1 of 2: one ==="
    assert headings[3].startswith("=== prompt 2 of 2, answer 2 of 2: two two") and headings[3].endswith("… ===")
    monkeypatch.setattr(Output, "is_rich", property(lambda self: True))
    assert main(["generate", "\x1b[2Jone", "two", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("\x1b[1m=== prompt 1 of 2: [2Jone ===\x1b[0m\necho [2Jone\n\n")


def test_json_lines(engine: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", "b", "--json", "--n", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["a", "b"]
    assert [output["text"] for output in lines[0]["outputs"]] == ["echo a", "echo a"]
    assert lines[0]["outputs"][0]["finish_reason"] == "stop" and lines[0]["metrics"]["ttft_ms"] == 12.0


def test_prompts_from_files_and_standard_input(
    engine: FakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, entries = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("one\n\ntwo\n", encoding="utf-8")
    entries.write_text('{"prompt": "x", "text": "y"}\n{"text": "z"}\n"w"\n', encoding="utf-8")
    assert generate.gather_prompts([], str(lines)) == ["one", "two"]
    assert generate.gather_prompts(["zero"], str(entries)) == ["zero", "x", "z", "w"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a document\nof two lines\n"))
    assert generate.gather_prompts([], "") == ["a document\nof two lines"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert generate.gather_prompts([], "-") == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate"]) == 2 and "Standard input is empty" in capsys.readouterr().err
    lines.write_text("\n")
    assert main(["generate", "--input", str(lines)]) == 2


def test_flags_reach_the_sampling_params(engine: FakeLLM) -> None:
    assert (
        main(
            [
                "generate",
                "a",
                "--temperature",
                "0.5",
                "--top-k",
                "7",
                "--seed",
                "3",
                "--stop",
                "x",
                "--stop",
                "y",
                "--stop-token-ids",
                "5",
                "--logit-bias",
                "4=-1.5",
                "--ignore-eos",
                "--no-skip-special-tokens",
                "--max-tokens",
                "none",
            ]
        )
        == 0
    )
    wanted = SamplingParams(
        temperature=0.5,
        top_k=7,
        seed=3,
        stop=["x", "y"],
        stop_token_ids=[5],
        logit_bias={4: -1.5},
        ignore_eos=True,
        skip_special_tokens=False,
        max_tokens=None,
    )
    assert engine.params == [wanted]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temperature", "nan"], "temperature must be a number"),
        (["--logit-bias", "x"], "ID=BIAS"),
        (["--top-k", "many"], "--top-k"),
        (["--temprature", "1"], "--temperature"),
        (["--n", "2", "--temperature", "0"], "equal"),
        (["--max-tokens", "0"], "max_tokens must be a whole number at least 1"),
        (["--max-tokens", "0"], "None stands for"),
        (["--max-tokens", "few"], "a whole number or none, not 'few'"),
    ],
)
def test_wrong_flags_are_refused(
    engine: FakeLLM, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "a", *flags]) == 2
    assert said in capsys.readouterr().err


def test_grammars_on_the_command_line() -> None:
    assert options.parse_grammar("json") == {"kind": "json", "value": None}
    assert options.parse_grammar("regex=a=b+") == {"kind": "regex", "value": "a=b+"}
    assert options.parse_grammar('choice=["yes", "no"]') == {"kind": "choice", "value": ["yes", "no"]}
    with pytest.raises(ArgumentTypeError, match="a JSON list"):
        options.parse_grammar("choice=yes")


def test_every_sampling_param_has_a_flag() -> None:
    names = [spec.name for spec in dataclasses.fields(SamplingParams) if spec.name not in options.NO_FLAGS]
    assert list(options.SAMPLING) and set(options.SAMPLING) == set(names)
    parser = Parser(prog="test")
    options.add_sampling_flags(parser)
    assert {f"--{name.replace('_', '-')}" for name in names} <= set(parser.flags())


def test_one_prompt_streams_to_a_terminal(
    engine: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Output, "is_rich", property(lambda self: True))
    parts: list[str] = []
    engine.on_word = lambda number: parts.append(capsys.readouterr().out)
    assert main(["generate", "a \x1b[2Jb"]) == 0
    parts.append(capsys.readouterr().out)
    assert parts == ["", "echo ", "a ", "[2Jb\n"]


def test_interrupt_keeps_finished_answers(engine: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    """To a pipe: the words that one answer has, and of several answers those that are complete, in their order."""

    def interrupt(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    engine.on_word = interrupt
    assert main(["generate", "a b c"]) == 130
    shown = capsys.readouterr()
    assert shown.out == "echo a \n" and "Interrupted." in shown.err and engine.is_closed
    five = ["p0", "p1", "p2", "p3", "p4"]
    assert main(["generate", *five]) == 130
    shown = capsys.readouterr()
    assert shown.out == "=== prompt 4 of 5: p3 ===\necho p3\n\n=== prompt 5 of 5: p4 ===\necho p4\n"
    assert "2 of 5 prompts are finished." in shown.err
    assert main(["generate", *five, "--json"]) == 130
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["p3", "p4"]


def test_results_are_written_in_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    fake = FakeLLM()
    for is_rich in (False, True):
        monkeypatch.setattr(Output, "is_rich", is_rich)
        writer = generate.Writer(Output(), 3)
        for place in (1, 0, 2):
            writer.add(place, fake._result(f"p{place}", SamplingParams()))
            shown.append(capsys.readouterr().out)
    assert [text.count("===\n") for text in shown] == [0, 2, 1, 0, 0, 0] and sorted(writer.waiting) == [0, 1, 2]


def test_failed_request_sets_the_exit_code(
    engine: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.error = DeviceError("no device")
    assert main(["generate", "x"]) == DeviceError.exit_code
    assert capsys.readouterr().out == ""
    made = engine._result("x", SamplingParams())
    made.outputs[0].finish_reason, made.outputs[0].error = "error", DeviceError("no memory")
    monkeypatch.setattr(engine, "_result", lambda *_: made)
    assert main(["generate", "x", "y"]) == 1
    assert "no memory" in capsys.readouterr().err


def test_control_characters_are_removed() -> None:
    assert printable("a\x1b]0;title\x07b\n\tc\x9b1m\r你🚀") == "a]0;titleb\n\tc1m你🚀"


# `archerfish tts` with a tiny random model


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Of the engine."""
    directory = tmp_path / "speaker"
    directory.mkdir()
    save_tiny_rwkv(directory, vocab_size=VOCAB_SIZE, hidden_size=32)
    return [
        "--model",
        str(directory),
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
        "--memory-budget-gib",
        "0.05",
        "--num-threads",
        "1",
    ]


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_texts_to_tokens(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tts", "Hello", "你好", *flags, "--seed", "3", "--max-tokens", "5", "--emotion", "sad"]) == 0
    first, second = lines_of(capsys)
    assert (first["text"], second["text"]) == ("Hello", "你好")
    assert len(first["global_tokens"]) == 32 and len(first["semantic_tokens"]) == 5
    assert (first["finish_reason"], first["seconds"]) == ("length", 0.1)
    voice = tmp_path / "voice.jsonl"
    voice.write_text(json.dumps(first) + "\n", encoding="utf-8")
    assert main(["tts", "Hello", *flags, "--reference", str(voice), "--max-tokens", "2"]) == 0
    (spoken,) = lines_of(capsys)
    assert spoken["global_tokens"] == first["global_tokens"] and len(spoken["semantic_tokens"]) == 2


def test_wrong_arguments_are_refused_before_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "a"}\n')
    for arguments, said in (
        (["--emotion", "hapy"], "Did you mean 'HAPPY'?"),
        (["--max-tokens", "0"], "at least 1"),
        (["--emotionn", "x"], "--emotion"),
        (["--reference", str(tmp_path / "none")], "does not exist"),
        (["--reference", str(other)], "does not begin with"),
        (["--reference", str(tmp_path)], "cannot be read"),
    ):
        assert main(["tts", "Hello", "--model", "/nowhere", *arguments]) in (2, 3), arguments
        assert said in capsys.readouterr().err


def test_jsonl_lines_have_own_voices_and_errors(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.jsonl"
    voice = {"ref_global_tokens": list(range(32)), "ref_semantic_tokens": [5]}
    long = {"text": "word " * 5000}
    entries = [{"text": "a"}, {"text": "a", **voice}, {"text": "a", "emotion": "SADD"}, {"text": " "}, long]
    texts.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    assert main(["tts", "--input", str(texts), *flags, "--seed", "1", "--max-tokens", "3"]) == 1
    plain, given, wrong, empty, too_long = lines_of(capsys)
    assert given["global_tokens"] == list(range(32)) != plain["global_tokens"] and len(given["semantic_tokens"]) == 3
    assert "Did you mean 'SAD'?" in wrong["error"] and "text is empty" in empty["error"]
    assert "leaves room for 0" in too_long["error"] and too_long["finish_reason"] == "error"
    texts.write_text("[1]\n", encoding="utf-8")
    assert main(["tts", "--input", str(texts), *flags]) == 2
    assert "Line 1 of" in capsys.readouterr().err
