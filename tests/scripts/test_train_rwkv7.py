"""Training on stories: red if the data, the course of a run or what is written at its end is wrong."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scripts.draw_stories import END_LINE, read_stories, to_text
from scripts.story_data import ANSWER, END, REQUEST, encode_stories, telling_nouns, train_tokenizer, with_request
from scripts.train_rwkv7 import LEAST_RATE, Course, Rows, main, rate_factor

ANIMALS = ("dog", "cat", "bird", "frog", "bear", "duck", "fish", "horse")
THINGS = ("ball", "boat", "hat", "stone", "leaf", "shell", "cake", "book")
STORIES = [
    f"Once upon a time there was a {animal} who lost a {thing}. The {animal} looked for the {thing} all day. Then it was happy."
    for animal in ANIMALS
    for thing in THINGS
]


def train(tmp_path: Path, name: str, *options: str) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text("".join(f"{story}\n{END_LINE}\n" for story in STORIES), encoding="utf-8")
    main(
        [
            str(path),
            str(tmp_path / name),
            "--vocab",
            "320",
            "--layers",
            "2",
            "--width",
            "64",
            "--rows",
            "2",
            "--length",
            "32",
            "--chunk",
            "16",
            "--held-out",
            "0.1",
            "--device",
            "cpu",
            "--show",
            "1",
            *options,
        ]
    )
    return tmp_path / name


def test_training_learns_and_is_repeatable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(tmp_path, "first", "--steps", "12", "--every", "0", "--rate", "0.01")
    assert read_stories(tmp_path / "stories.txt") == STORIES
    losses = [float(each) for each in re.findall(r"held-out ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1.0
    second = train(tmp_path, "second", "--steps", "12", "--rate", "0.01")
    for name, value in load_file(first / "model.safetensors").items():
        assert value.dtype == torch.float16
        assert torch.equal(value, load_file(second / "model.safetensors")[name]), name
    config = json.loads((first / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (2, 64, 320)


def test_nan_loss_restores_the_last_good_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = train(tmp_path, "wild", "--steps", "4", "--every", "0", "--rate", "1e30")
    assert "Going back" in capsys.readouterr().out
    assert all(bool(value.isfinite().all()) for value in load_file(written / "model.safetensors").values())


def test_interrupted_run_writes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.train_rwkv7.rate_factor", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, "broken", "--seconds", "100")
    assert (tmp_path / "broken" / "model.safetensors").is_file()


def test_course_ends_by_steps_or_time() -> None:
    assert Course(10, None).progress(5, 1e9) == 0.5
    assert Course(None, 20.0).progress(10**9, 5.0) == 0.25
    assert Course(10, 20.0).progress(5, 15.0) == 0.75
    assert Course(10, 20.0).progress(11, 0.0) == 1.0


def test_learning_rate_rises_then_falls() -> None:
    rates = [rate_factor(each) for each in np.linspace(0.0, 1.0, 401)]
    top = int(np.argmax(rates))
    assert 0 < top < 20
    assert rates == [*sorted(rates[: top + 1]), *sorted(rates[top + 1 :], reverse=True)]
    assert rates[top] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(LEAST_RATE)


def test_rows_start_at_stories() -> None:
    stories = [np.array([END, *range(10 * i, 10 * i + 5)], np.uint16) for i in range(1, 9)]
    rows = Rows.of(stories, 8, "cpu")
    first, third = rows.at(torch.tensor([0, 2])).tolist()
    assert first == [END, 10, 11, 12, 13, 14, END, 20, 21]
    assert third == [END, 30, 31, 32, 33, 34, END, 40, 41]
    drawn = rows.draw(50, torch.Generator().manual_seed(0))
    assert set(drawn[:, 0].tolist()) == {END}
    assert len(set(drawn[:, 1].tolist())) == 7  # after the last start there is no whole row
    with pytest.raises(SystemExit, match="too few"):
        Rows.of([np.array([END, 5], np.uint16)], 64, "cpu")


def test_requests_name_nouns_of_their_story() -> None:
    assert telling_nouns(STORIES) == {*ANIMALS, *THINGS}
    story = "There was a big dragon in the wood. It met the cow and a hen."
    draw = random.Random(0)
    requests = set()
    for _ in range(200):
        request = with_request(story, frozenset({"dragon", "cow", "hen", "boat"}), draw)
        found = re.fullmatch(re.escape(REQUEST) + r"(.+)" + re.escape(ANSWER + story), request)
        assert found is not None
        assert any(word in found[1] for word in ("dragon", "cow", "hen"))
        assert "boat" not in found[1]
        requests.add(found[1])
    assert {"hen", "Tell me a story about a cow and a dragon.", "Write a story with dragon, hen and cow."} <= requests
    assert with_request(story, frozenset({"boat"}), draw) == story


def test_every_second_story_has_a_request() -> None:
    names = ("".join(letters) for letters in itertools.product("bdfghklm", "aeiou", "lmnr"))
    stories = [f"There was once a {name}." for name in names]
    tokenizer = train_tokenizer(stories, 300)
    encoded = encode_stories(tokenizer, stories, seed=0)
    asked = tokenizer.token_to_id(REQUEST)
    assert {int(each[0]) for each in encoded} == {END}
    assert [asked in each for each in encoded[:6]] == [False, True] * 3


def test_incomplete_stories_are_dropped() -> None:
    pieces = [b"", b"", b" Once" * 30, b" end", b".", b"\xe2\x82", b"\xac"]
    assert to_text(pieces, [2, 3, 4]) == ("Once " * 30 + "end.")
    assert to_text(pieces, [2, 6, 4]) is None  # not UTF-8
    assert to_text(pieces, [2, 3]) is None  # no full stop
    assert to_text(pieces, [3, 4]) is None  # hardly anything
    assert to_text(pieces, [2, 5, 6, 4]) == ("Once " * 30)[:-1] + "€."
