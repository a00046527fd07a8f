"""`archerfish bench tts`."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from argparse import Namespace
from pathlib import Path

from archerfish.cli import bench_generate
from archerfish.cli.bench_rwkv import SHAPE_NAMES
from archerfish.cli.options import Parser
from archerfish.cli.output import Output
from archerfish.config import EngineConfig

STRATEGIES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--shape", default="0.4b", choices=SHAPE_NAMES, help=(
        "random weights of this shape, unless --model names a model (default: 0.4b)"))  # fmt: skip
    parser.add_argument("--streams", default="1,64,1000", metavar="A,B", help="streams at once (default: 1,64,1000)")
    bench_generate.add_arguments(parser)


def run(arguments: Namespace, out: Output) -> int:
    config = bench_generate.engine_config(arguments)
    from archerfish.bench import rwkv, tts
    from archerfish.engine.tts import VOCAB_SIZE

    streams = bench_generate.read_numbers("--streams", arguments.streams)
    report = bench_generate.new_report(out)
    with tempfile.TemporaryDirectory(prefix="archerfish-") as scratch:
        shape = None
        if config.model == EngineConfig().model:
            shape = rwkv.write_shape(arguments.shape, Path(scratch) / f"rwkv7-{arguments.shape}", VOCAB_SIZE)
            config = config.replace(model=str(shape), load_format="dummy")
        with out.progress("Measuring") as progress:
            tts.measure(config, report, arguments.rounds, streams, progress)
        if shape is not None and not arguments.no_peers and importlib.util.find_spec("rwkv") is not None:
            values = json.loads((shape / "config.json").read_text())
            path = tts.write_checkpoint(values, Path(scratch) / "peer.pth")
            kind = STRATEGIES.get(config.dtype, "bf16" if config.device == "cuda" else "fp32")
            tts.measure_package(report, arguments.rounds, path, f"{config.device} {kind}")
    named = config.replace(model=Path(config.model).name)
    return bench_generate.show("tts", report, tts.bars(report), named, arguments, out)
