"""`archerfish generate`: prompts to texts, streamed to a terminal or as JSON lines."""

from __future__ import annotations

import dataclasses
import sys
import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from archerfish.cli.llm import add_sampling, open_engine, sampling
from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output, printable, seconds
from archerfish.config import EngineConfig, HubConfig
from archerfish.errors import InvalidInputError

if TYPE_CHECKING:
    from archerfish.engine.llm_engine import LLMEngine
    from archerfish.engine.outputs import CompletionOutput, RequestOutput
    from archerfish.params import SamplingParams

DEFAULTS: dict[str, Any] = {"max_tokens": 128}
TITLE_WIDTH = 72


def add_arguments(parser: Parser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; without any, all of standard input is one")
    parser.add_argument(
        "--input", default="", metavar="FILE", help='a prompt per line, or .jsonl with "prompt"; - is standard input, by lines'
    )
    add_sampling(parser, **DEFAULTS)
    add_options(parser, EngineConfig, HubConfig)


def run(arguments: Namespace, out: Output) -> int:
    config, hub = section(EngineConfig, arguments), section(HubConfig, arguments)
    params = sampling(arguments, **DEFAULTS)
    prompts = gather_prompts(arguments.prompts, arguments.input)
    if (params.logprobs is not None or params.prompt_logprobs is not None) and not out.as_json:
        out.note("Log-probabilities are part of the JSON: add --json.")
    with open_engine(config, hub, out) as engine:
        started = time.perf_counter()
        if len(prompts) == 1 and params.n == 1 and out.is_rich:
            outputs = stream_one(engine, prompts[0], params)
        else:
            outputs = engine.generate(prompts, params, show_progress=out.shows_progress)
            show(out, outputs)
        elapsed_s = time.perf_counter() - started
        note(out, engine.model_name, outputs, elapsed_s)
    failed = [output for request in outputs for output in request.outputs if output.finish_reason == "error"]
    for output in failed:
        out.note(f"Failed: {output.error}")
    return 1 if failed else 0


def gather_prompts(given: list[str], input_file: str) -> list[str]:
    """Prompts of the command line, then of a file; without either, standard input as one prompt."""
    from archerfish.cli.texts import gather_texts

    if not given and not input_file and not sys.stdin.isatty():
        text = sys.stdin.read().rstrip("\r\n")
        if not text:
            raise InvalidInputError("Standard input is empty.", hint="Give prompts as arguments or with --input FILE.")
        return [text]
    found = gather_texts(given, input_file, fields=("prompt", "text"))
    prompts = found[: len(given)] + [prompt for prompt in found[len(given) :] if prompt]
    if not prompts:
        raise InvalidInputError(f"There is no prompt in {input_file}.")
    return prompts


def stream_one(engine: LLMEngine, prompt: str, params: SamplingParams) -> list[RequestOutput]:
    """One answer as it comes, to a terminal."""
    result: list[RequestOutput] = []
    for delta in engine.stream(prompt, params):
        sys.stdout.write(printable(delta.text))
        sys.stdout.flush()
        if delta.output is not None:
            result.append(delta.output)
    sys.stdout.write("\n")
    return result


def show(out: Output, outputs: list[RequestOutput]) -> None:
    for request in outputs:
        if out.as_json:
            out.result(as_json(request))
            continue
        for output in request.outputs:
            if len(outputs) > 1 or len(request.outputs) > 1:
                title = " ".join((request.prompt or str(request.prompt_token_ids)).split())
                out.line(title if len(title) <= TITLE_WIDTH else title[: TITLE_WIDTH - 1] + "…", style="bold")
            out.line(printable(output.text) if out.is_rich else output.text)


def as_json(request: RequestOutput) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt": request.prompt,
        "outputs": [output_as_json(output) for output in request.outputs],
        "num_cached_tokens": request.num_cached_tokens,
        "metrics": dataclasses.asdict(request.metrics),
    }
    if request.prompt_logprobs is not None:
        found["prompt_logprobs"] = [dataclasses.asdict(item) for item in request.prompt_logprobs]
    return found


def output_as_json(output: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        found["cumulative_logprob"] = output.cumulative_logprob
        found["logprobs"] = [dataclasses.asdict(item) for item in output.logprobs]
    if output.error is not None:
        found["error"] = str(output.error)
    return found


def note(out: Output, model_name: str, outputs: list[RequestOutput], elapsed_s: float) -> None:
    num_tokens = sum(len(output.token_ids) for request in outputs for output in request.outputs)
    num_prompt = sum(len(request.prompt_token_ids) for request in outputs)
    num_cached = sum(request.num_cached_tokens for request in outputs)
    cached = f", {num_cached:,} of them cached" if num_cached else ""
    out.note(
        f"{model_name}: {num_prompt:,} prompt tokens{cached}, {num_tokens:,} tokens in {seconds(elapsed_s)}, "
        f"{num_tokens / max(elapsed_s, 1e-9):,.1f} tokens/s"
    )
