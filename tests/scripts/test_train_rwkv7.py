"""Training on stories: red if the data, the course of a run or what is written at its end is wrong."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scripts.draw_stories import END_LINE, Drawing, Teacher, read_stories, rotate, to_text
from scripts.rwkv7_training import Parts, finish
from scripts.story_data import ANSWER, END, REQUEST, encode_stories, telling_nouns, train_tokenizer, with_request
from scripts.train_rwkv7 import LEAST_RATE, Course, Rows, Training, main, rate_factor, time_limit

ANIMALS = ("dog", "cat", "bird", "frog", "bear", "duck", "fish", "horse")
THINGS = ("ball", "boat", "hat", "stone", "leaf", "shell", "cake", "book")
STORIES = [
    f"Once upon a time there was a {animal} who lost a {thing}. The {animal} looked for the {thing} all day. Then it was happy."
    for animal in ANIMALS for thing in THINGS
]  # fmt: skip


def write_stories(path: Path) -> Path:
    path.write_text("".join(f"{story}\n{END_LINE}\n" for story in STORIES), encoding="utf-8")
    return path


def train(tmp_path: Path, name: str, *options: str) -> Path:
    path = write_stories(tmp_path / "stories.txt")
    main([
        str(path), str(tmp_path / name), "--vocab", "320", "--layers", "2", "--width", "64", "--rows", "4", "--length", "64",
        "--chunk", "16", "--held-out", "0.1", "--device", "cpu", "--show", "4", *options,
    ])  # fmt: skip
    return tmp_path / name


def test_a_run_learns_and_can_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(tmp_path, "first", "--steps", "12", "--every", "0", "--rate", "0.01")
    losses = [float(each) for each in re.findall(r"held-out ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1.0
    second = train(tmp_path, "second", "--steps", "12", "--rate", "0.01")
    for name, value in load_file(first / "model.safetensors").items():
        assert value.dtype == torch.float16
        assert torch.equal(value, load_file(second / "model.safetensors")[name]), name
    config = json.loads((first / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (2, 64, 320)


def test_losses_that_are_no_numbers_leave_the_last_good_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = train(tmp_path, "wild", "--steps", "4", "--every", "0", "--rate", "1e30")
    assert "Going back" in capsys.readouterr().out
    assert all(bool(value.isfinite().all()) for value in load_file(written / "model.safetensors").values())


def test_an_interrupted_run_leaves_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.train_rwkv7.rate_factor", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, "broken", "--seconds", "100")
    assert (tmp_path / "broken" / "model.safetensors").is_file()


def interrupt(progress: float) -> float:
    raise KeyboardInterrupt


def broken_parts() -> Parts:
    raise RuntimeError("no compiler here")


def wrong_parts() -> Parts:
    return Parts(finish=lambda *arguments: 2.0 * finish(*arguments))


@pytest.mark.parametrize(("parts", "told"), [(broken_parts, "no compiler here"), (wrong_parts, "NOT the same")])
def test_what_a_compiler_makes_is_not_trusted(
    parts: Callable[[], Parts], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used = []
    monkeypatch.setattr(Parts, "compiled", parts)
    monkeypatch.setattr(Training, "run", lambda self, course: used.append(self.model.parts))
    train(tmp_path, "distrusted", "--steps", "1", "--compile")
    assert told in capsys.readouterr().out
    assert used == [Parts()]


def test_a_time_limit_ends_what_would_not_end() -> None:
    with pytest.raises(TimeoutError), time_limit(0.01):
        while True:
            pass


def test_how_long_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--seconds"):
        train(tmp_path, "none")


def test_the_course_ends_by_steps_or_time_whichever_is_first() -> None:
    assert Course(10, None).progress(5, 1e9) == 0.5
    assert Course(None, 20.0).progress(10**9, 5.0) == 0.25
    assert Course(10, 20.0).progress(5, 15.0) == 0.75
    assert Course(10, 20.0).progress(11, 0.0) == 1.0


def test_the_rate_rises_then_falls() -> None:
    rates = [rate_factor(each) for each in np.linspace(0.0, 1.0, 401)]
    top = int(np.argmax(rates))
    assert 0 < top < 20
    assert rates == [*sorted(rates[: top + 1]), *sorted(rates[top + 1 :], reverse=True)]
    assert rates[top] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(LEAST_RATE)


def test_rows_begin_with_stories_and_go_on_with_the_next() -> None:
    stories = [np.array([END, *range(10 * i, 10 * i + 5)], np.uint16) for i in range(1, 9)]
    rows = Rows.of(stories, 8, "cpu")
    first, third = rows.at(torch.tensor([0, 2])).tolist()
    assert first == [END, 10, 11, 12, 13, 14, END, 20, 21]
    assert third == [END, 30, 31, 32, 33, 34, END, 40, 41]
    drawn = rows.draw(50, torch.Generator().manual_seed(0))
    assert set(drawn[:, 0].tolist()) == {END}
    assert len(set(drawn[:, 1].tolist())) == 7  # after the last start there is no whole row


def test_too_few_stories_are_refused() -> None:
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


def test_stories_survive_their_file(tmp_path: Path) -> None:
    assert read_stories(write_stories(tmp_path / "stories.txt")) == STORIES


def test_only_whole_stories_are_kept() -> None:
    pieces = [b"", b"", b" Once" * 30, b" end", b".", b"\xe2\x82", b"\xac"]
    assert to_text(pieces, [2, 3, 4]) == ("Once " * 30 + "end.")
    assert to_text(pieces, [2, 6, 4]) is None  # not UTF-8
    assert to_text(pieces, [2, 3]) is None  # no full stop
    assert to_text(pieces, [3, 4]) is None  # hardly anything
    assert to_text(pieces, [2, 5, 6, 4]) == ("Once " * 30)[:-1] + "€."


def tiny_teacher() -> Teacher:
    generator = torch.Generator().manual_seed(0)
    width, layers, length = 16, 2, 12
    shapes = {
        **dict.fromkeys(("query", "key", "value", "out"), (layers, width, width)),
        **dict.fromkeys(("attention_norm", "mlp_norm"), (layers, width)), "embedding": (40, width), "norm": (width,),
        "gate": (layers, 24, width), "down": (layers, width, 24), "up": (layers, 24, width),
    }  # fmt: skip
    weights = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    return Teacher({**weights, "cosine": angles.cos(), "sine": angles.sin()}, [b"x"] * 40, 2, length)


def test_drawing_follows_the_whole_text_so_far() -> None:
    """Logits of the last token depend on all before it, as a plain computation without remembered keys says."""
    teacher = tiny_teacher()
    tokens = torch.tensor([[1, 5, 9, 30], [1, 7, 9, 30]])
    drawing = Drawing(teacher, 2)
    logits = [drawing.step(tokens[:, position], position) for position in range(4)][-1]
    torch.testing.assert_close(logits, plain_logits(teacher, tokens), atol=1e-4, rtol=1e-4)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def plain_logits(teacher: Teacher, tokens: torch.Tensor) -> torch.Tensor:
    """Of the last token, all tokens computed together."""
    w, length = teacher.weights, tokens.shape[1]
    x = w["embedding"][tokens]
    mask = torch.ones(length, length).tril() == 0

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    for layer in range(teacher.num_layers):
        normed = norm(x, w["attention_norm"][layer])
        q, k, v = ((normed @ w[name][layer].T).view(2, length, 2, 8).transpose(1, 2) for name in ("query", "key", "value"))
        q, k = (rotate(each, w["cosine"][:length], w["sine"][:length]) for each in (q, k))
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(mask, float("-inf")).softmax(-1)
        x = x + (scores @ v).transpose(1, 2).reshape(2, length, 16) @ w["out"][layer].T
        normed = norm(x, w["mlp_norm"][layer])
        gate = normed @ w["gate"][layer].T
        x = x + (gate * gate.sigmoid() * (normed @ w["up"][layer].T)) @ w["down"][layer].T
    return norm(x[:, -1], w["norm"]) @ w["embedding"].T
