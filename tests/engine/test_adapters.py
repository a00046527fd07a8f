"""Adapters in the engine: answers equal PEFT's whatever runs beside them, slots are shared, contexts kept apart by
content."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archerfish import LLM, LLMEngine, LoRARequest
from archerfish.config import EngineConfig
from archerfish.engine.beam_search import BeamSearchParams
from archerfish.errors import ArcherfishError, InvalidInputError, InvalidOptionError, NotFoundError, StoppedError
from archerfish.sched.plan import MAX_OVERTAKEN
from tests.cache.invariants import check_slots
from tests.engine.tiny_llama import check_memory, greedy, prompts, tokens
from tests.models.decoding import make
from tests.models.peft_adapters import add_adapter

NUM = 6  # adapters
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_cache_tokens": 4096,
    "max_num_seqs": 8,
    "num_threads": 1,
    "enable_lora": True,
    "max_lora_rank": 8,
    "tokenizer": "none",
}
TARGETS = [["q_proj", "v_proj"], ["embed_tokens", "lm_head", "o_proj"], "all-linear"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and adapters beside it."""
    root = tmp_path_factory.mktemp("adapters")
    model, _ = make("llama")
    model.save_pretrained(root / "model")
    for i in range(NUM):
        add_adapter(model, root / "lora" / f"a{i}", seed=i, target_modules=TARGETS[i % 3], r=4 + i % 3)
    return root


@pytest.fixture(scope="module")
def adapted(places: Path) -> dict[str, Any]:
    """What PEFT computes."""
    import peft

    model, _ = make("llama")
    found = {
        f"a{i}": peft.PeftModel.from_pretrained(copy.deepcopy(model), str(places / "lora" / f"a{i}"))
        for i in range(NUM)
    }
    return {"": model, **found}


def expected(model: Any, prompt: list[int], num: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture
def engine(places: Path) -> Iterator[LLMEngine]:
    with LLMEngine(str(places / "model"), **OPTIONS, max_loras=2, lora_dir=str(places / "lora")) as made:
        yield made
        check_memory(made)
        assert made.adapters is not None
        check_slots(made.adapters.slots)


def run(engine: LLMEngine, work: list[tuple[list[int], str]], num: int = 8) -> list[list[int]]:
    """Greedy answers to prompts with adapters, all together."""
    prompts_of, names = map(list, zip(*work, strict=True))
    return tokens(engine.generate(prompts_of, greedy(num), lora_request=[name or None for name in names]))


def test_mixed_batches_equal_peft(engine: LLMEngine, adapted: dict[str, Any]) -> None:
    """More adapters than slots, and none: those without a slot wait for one, and all are answered as if they were
    alone."""
    work = [(prompt, list(adapted)[i % (NUM + 1)]) for i, prompt in enumerate(prompts(14, most=20))]
    answers = [expected(adapted[name], prompt, 5) for prompt, name in work]
    assert run(engine, work, 5) == answers
    assert engine.adapters is not None and engine.adapters.slots.num_loads >= NUM
    assert run(engine, work, 5) == answers, "from the cache"


def test_experts(tmp_path: Path) -> None:
    """Refused unless slots have room for them; beside rows without an adapter, and one of attention alone, as PEFT
    computes."""
    model, _ = make("mixtral")
    model.save_pretrained(tmp_path / "model")
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    models = {
        "": model,
        "experts": add_adapter(model, tmp_path / "lora" / "experts", target_parameters=stacks, target_modules=[]),
        "attention": add_adapter(model, tmp_path / "lora" / "attention", seed=1, target_modules=["q_proj"]),
    }
    work = [(prompt, list(models)[i % 3]) for i, prompt in enumerate(prompts(6, most=20))]
    options = {**OPTIONS, "lora_dir": str(tmp_path / "lora")}
    with LLMEngine(str(tmp_path / "model"), **options, lora_experts=True) as engine:
        assert run(engine, work, 5) == [expected(models[name], prompt, 5) for prompt, name in work]
    with LLMEngine(str(tmp_path / "model"), **options) as engine:
        with pytest.raises(ArcherfishError, match="adapts the experts of the model") as raised:
            run(engine, work[1:2])
        assert "lora_experts=True" in raised.value.hint
        assert run(engine, work[2:3], 5) == [expected(models["attention"], work[2][0], 5)]


def test_contexts_are_kept_apart_by_content(
    engine: LLMEngine, places: Path, adapted: dict[str, Any], tmp_path: Path
) -> None:
    library, prompt = engine.adapters, prompts(1, least=40, most=40)[0]
    assert library is not None
    shutil.copytree(places / "lora" / "a0", tmp_path / "x")
    library.load("x", tmp_path / "x")
    first = library.load("same", places / "lora" / "a0")
    assert library.find("x").number == first.number

    def cached(name: str) -> int:
        output = engine.generate(prompt, greedy(4), adapter=name)[0]
        assert output.token_ids == expected(adapted[{"x": "a0", "same": "a0", "y": "a1"}.get(name, name)], prompt, 4)
        return output.num_cached_tokens

    assert cached("x") == 0 and cached("same") > 30, "one content under two names shares"
    assert cached("a1") == 0 and cached("") == 0, "others do not"
    assert cached("a1") > 30
    for file in (places / "lora" / "a1").iterdir():
        shutil.copy(file, tmp_path / "x" / file.name)
    with pytest.raises(InvalidInputError, match="There is an adapter 'x' already"):
        library.load("x", places / "lora" / "a1")
    library.load("x", tmp_path / "x", in_place=True)
    output = engine.generate(prompt, greedy(4), adapter="x")[0]
    assert output.token_ids == expected(adapted["a1"], prompt, 4), (
        "a name that was loaded again never reuses old contexts"
    )
    library.unload("x")
    with pytest.raises(NotFoundError, match="no adapter 'x'"):
        engine.generate(prompt, greedy(4), adapter="x")


def test_an_adapter_that_has_gone_ends_its_requests_alone(engine: LLMEngine, places: Path, tmp_path: Path) -> None:
    """Its content left the machine's memory before it came to the device, and its file is another by now."""
    library = engine.adapters
    assert library is not None
    shutil.copytree(places / "lora" / "a0", tmp_path / "x")
    library.load("x", tmp_path / "x")
    library._content.clear()
    shutil.copy(places / "lora" / "a3" / "adapter_model.safetensors", tmp_path / "x")
    ids = [engine.add_request([5, 6, 7], greedy(4), adapter=name) for name in ("x", "a1")]
    while any(engine.get_output(each) is None for each in ids):
        engine.step()
    outputs = [engine.get_output(each) for each in ids]
    assert [output and output.finish_reason for output in outputs] == ["error", "length"]
    shutil.copy(places / "lora" / "a0" / "adapter_model.safetensors", tmp_path / "x")
    assert engine.generate([5, 6, 7], greedy(4), adapter="x")[0].finish_reason == "length", (
        "whoever names it tries again"
    )


def test_files_that_are_saved_again(engine: LLMEngine, places: Path, adapted: dict[str, Any]) -> None:
    """As training does it, under the same path: another number has them read again, as loading in place does."""
    library, path = engine.adapters, places / "lora" / "again"
    assert library is not None

    def save(name: str) -> None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(places / "lora" / name, path)

    def answer(wanted: Any) -> list[int]:
        return tokens(engine.generate([[5, 6, 7]], greedy(4), lora_request=wanted))[0]

    one, other = (expected(adapted[name], [5, 6, 7], 4) for name in ("a0", "a3"))
    save("a0")
    assert answer(LoRARequest("again", 1, str(path))) == one != other
    save("a3")
    assert answer(LoRARequest("again", 1, str(path))) == one and answer(LoRARequest("again", 2, str(path))) == other
    save("a0")
    with pytest.raises(InvalidInputError, match=r"of what .* was before"):
        library.load("again", path)
    library.unload("again")
    assert answer("again") == one, "found in lora_dir"
    save("a3")
    library._content.clear()
    library.slots.clear()
    assert engine.generate([5, 6, 7], greedy(4), adapter="again")[0].finish_reason == "error", "it has changed"
    assert answer("again") == other, "the next request takes what lies there now"
    shutil.rmtree(path)


def test_those_that_wait_for_a_slot_leave_room_for_others(places: Path, adapted: dict[str, Any]) -> None:
    """However many wait for the adapter that has no slot, a request behind them that needs none begins at once."""
    with LLMEngine(str(places / "model"), **OPTIONS, max_loras=1, lora_dir=str(places / "lora")) as engine:
        first = engine.add_request([5, 6, 7], greedy(50), adapter="a0")
        while engine.scheduler.tokens_done[1] == 0:
            engine.step()
        many = prompts(2 * MAX_OVERTAKEN, most=5)
        waiting = [engine.add_request(prompt, greedy(2), adapter="a1") for prompt in many]
        plain = engine.add_request([8, 9, 10], greedy(4))
        while engine.get_output(plain) is None:
            engine.step()
            assert engine.get_output(first) is None
        while any(engine.get_output(each) is None for each in waiting):
            engine.step()
        last: Any = engine.get_output(waiting[-1])
        assert last.token_ids == expected(adapted["a1"], many[-1], 2)


def test_content_is_read_again_from_where_it_still_lies(engine: LLMEngine, places: Path, tmp_path: Path) -> None:
    """Of two names with one content, one's file has gone and another's has changed."""
    library = engine.adapters
    assert library is not None
    for name in ("x", "y", "z"):
        shutil.copytree(places / "lora" / "a0", tmp_path / name)
        library.load(name, tmp_path / name)
    library._content.clear()
    shutil.rmtree(tmp_path / "x")
    shutil.copy(places / "lora" / "a3" / "adapter_model.safetensors", tmp_path / "z")
    assert [engine.generate([5, 6, 7], greedy(4), adapter=name)[0].finish_reason for name in "xz"] == ["length"] * 2
    library._content.clear()
    library.slots.clear()
    shutil.rmtree(tmp_path / "y")
    assert engine.generate([5, 6, 7], greedy(4), adapter="x")[0].finish_reason == "error"
    shutil.copytree(places / "lora" / "a0", tmp_path / "x")
    assert engine.generate([5, 6, 7], greedy(4), adapter="y")[0].finish_reason == "length"


def test_requests_from_several_threads_while_adapters_change(engine: LLMEngine, adapted: dict[str, Any]) -> None:
    rng, results = np.random.default_rng(3), dict[int, bool]()
    work = [(rng.integers(3, 90, 9).tolist(), list(adapted)[int(rng.integers(0, NUM + 1))]) for _ in range(24)]

    def ask(place: int) -> None:
        for i in range(place, len(work), 3):
            prompt, name = work[i]
            found = engine.generate(prompt, greedy(5), adapter=name)
            results[i] = tokens(found)[0] == expected(adapted[name], prompt, 5)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(len(work)), True)


@pytest.mark.parametrize("options", [{"deterministic": True}, {"speculation": "ngram"}, {"max_num_batched_tokens": 24}])
def test_other_modes(places: Path, adapted: dict[str, Any], options: dict[str, Any]) -> None:
    work = [([7, 8, 9, 10] * 8, name) for name in ("a0", "", "a2")]
    with LLMEngine(str(places / "model"), **{**OPTIONS, **options}, lora_dir=str(places / "lora")) as engine:
        assert run(engine, work, 10) == [expected(adapted[name], prompt, 10) for prompt, name in work]


def test_names_of_vllm(places: Path, adapted: dict[str, Any]) -> None:
    """LLM(enable_lora=True) and LoRARequest; one for all prompts or one for each."""
    options = {name: value for name, value in OPTIONS.items() if name != "tokenizer"}
    with LLM(str(places / "model"), **options, skip_tokenizer_init=True, max_loras=1) as llm:
        requests = [LoRARequest(f"a{i}", i + 1, str(places / "lora" / f"a{i}")) for i in range(2)]
        many: list[Any] = prompts(2, most=9)
        found = tokens(llm.generate(many, greedy(4), lora_request=[requests[0], None]))
        assert found == [expected(adapted["a0"], many[0], 4), expected(adapted[""], many[1], 4)]
        assert tokens(llm.generate(many, greedy(4), lora_request=requests[1])) == [
            expected(adapted["a1"], p, 4) for p in many
        ]
        params = BeamSearchParams(beam_width=1, max_tokens=3, ignore_eos=True)
        [beams] = llm.beam_search([{"prompt_token_ids": many[0]}], params, requests[0])
        assert beams.sequences[0].tokens[-3:] == expected(adapted["a0"], many[0], 3)
        llm.sleep(2)
        for request in (requests[1], LoRARequest("a2", 3, str(places / "lora" / "a2"))):
            with pytest.raises(StoppedError, match="sleeps"):
                llm.generate(many, greedy(4), lora_request=request)
        llm.wake_up()
        assert tokens(llm.generate(many, greedy(4), lora_request=requests[1])) == [
            expected(adapted["a1"], p, 4) for p in many
        ]


def test_paths_and_options_that_are_refused(places: Path, engine: LLMEngine, tmp_path: Path) -> None:
    library = engine.adapters
    assert library is not None
    (tmp_path / "outside").mkdir()
    for path in ("../model", "/etc", "a0/../../model", "."):
        with pytest.raises(ArcherfishError, match="outside of the directory of adapters"):
            library.allowed_path(path)
    for path in ("x" * 300, "a\0b", "\ud800"):
        with pytest.raises(ArcherfishError, match="cannot be read as a path"):
            library.allowed_path(path)
    assert library.allowed_path("~nobody/x") == places / "lora" / "~nobody" / "x", "no home of a user"
    for name in (
        "../lora/a0",
        "..",
        "a0/../a0",
        "",
        "nowhere",
        "~nobody",
        "~",
        "x" * 256,
        "\u00e9" * 128,
        "a\0",
        "\ud800",
    ):
        with pytest.raises(NotFoundError):
            library.find(name)
    for name in ("", "a\nb", "x" * 300):
        with pytest.raises(InvalidInputError, match="cannot have the name"):
            library.load(name, places / "lora" / "a0")
    for modules in ("a0", "a=x,a=y", '{"name": "a"}'):
        with pytest.raises(InvalidOptionError, match=r"is not name=path|names an adapter twice"):
            LLMEngine(str(places / "model"), **OPTIONS, lora_modules=modules)
    stated = EngineConfig(lora_modules='[{"name": "a", "path": "x,y"}, {"name": "b", "path": "z"}]')
    assert stated.lora_paths == {"a": "x,y", "b": "z"}
    with pytest.raises(InvalidOptionError, match="no directory /nowhere"):
        LLMEngine(str(places / "model"), **OPTIONS, lora_dir="/nowhere")
    with LLMEngine(str(places / "model"), **{**OPTIONS, "enable_lora": False}) as plain:
        assert plain.runner.ops.adapters is None
        with pytest.raises(InvalidInputError, match="was started without adapters") as caught:
            plain.generate([3], adapter="a0")
        assert "enable_lora" in str(caught.value.hint)


def test_the_start_refuses_a_wrong_adapter(places: Path, tmp_path: Path) -> None:
    shutil.copytree(places / "lora" / "a0", tmp_path / "x")
    config = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    (tmp_path / "x" / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(ArcherfishError, match="use_dora"):
        LLMEngine(str(places / "model"), **OPTIONS, lora_modules=f"x={tmp_path / 'x'}")
