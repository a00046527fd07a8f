"""Further peers of `archerfish bench cpu`: ONNX Runtime and OpenVINO on an exported BERT, and NumPy on the bare
machine.

Like `engines.py`, this file runs in the process of one engine.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archerfish.bench.engines import EmbeddingEngine, Engine, main
from archerfish.bench.words import random_text

INPUTS = ("input_ids", "attention_mask")
NUM_CALIBRATION_TEXTS = 64
Inputs = dict[str, Any]


class ExportedModel(EmbeddingEngine):
    """A BERT as an ONNX graph from token ids to normalised means. It is exported once, by the first process that needs
    it."""

    batch_sizes = (8, 32)

    def __init__(self, *, precision: str = "float32", **arguments: Any) -> None:
        super().__init__(**arguments)
        self.precision, self.folder = precision, Path(self.cache_dir) / "bench"

    def load(self) -> None:
        from tokenizers import Tokenizer

        source = Path(self.source)
        self.tokenizer: Any = Tokenizer.from_file(str(source / "tokenizer.json"))
        limits = json.loads((source / "sentence_bert_config.json").read_text(encoding="utf-8"))
        self.tokenizer.enable_truncation(limits["max_seq_length"])
        self.tokenizer.no_padding()
        self.open_graph(self.written(f"{source.name}.onnx", self.export))

    def open_graph(self, graph: Path) -> None:
        raise NotImplementedError

    def infer(self, batches: list[Inputs]) -> list[Any]:
        """The vectors of each batch."""
        raise NotImplementedError

    def encode(self, texts: list[str], batch_size: int) -> Any:
        """Texts of like length share a batch, the longest first."""
        import numpy as np

        tokens = [found.ids for found in self.tokenizer.encode_batch(texts)]
        order = sorted(range(len(texts)), key=lambda place: -len(tokens[place]))
        places = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
        found = self.infer([make_inputs([tokens[place] for place in part]) for part in places])
        vectors = np.empty((len(texts), found[0].shape[1]), np.float32)
        vectors[order] = np.concatenate(found)
        return vectors

    def written(self, name: str, write: Callable[[str], None]) -> Path:
        """A file that is written by the first process that asks for it."""
        path = self.folder / name
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"unfinished-{os.getpid()}-{name}")
            write(str(unfinished))
            unfinished.replace(path)
        return path

    def export(self, path: str) -> None:
        import torch
        from transformers import AutoModel

        class Pooled(torch.nn.Module):
            def __init__(self, model: torch.nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                hidden, kept = (
                    self.model(input_ids=ids, attention_mask=mask).last_hidden_state,
                    mask[:, :, None].float(),
                )
                return torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)

        model = Pooled(AutoModel.from_pretrained(self.source, attn_implementation="eager")).eval()
        given = torch.ones((2, 16), dtype=torch.int64)
        axes = {name: {0: "batch", 1: "length"} for name in INPUTS} | {"vectors": {0: "batch"}}
        names: dict[str, Any] = {"input_names": list(INPUTS), "output_names": ["vectors"], "dynamic_axes": axes}
        torch.onnx.export(model, (given, given.tril()), path, **names, dynamo=False)  # a mask of ones would be left out


def make_inputs(tokens: list[list[int]]) -> Inputs:
    """Ids and mask of one batch, padded to its longest text."""
    import numpy as np

    ids, mask = (np.zeros((len(tokens), max(map(len, tokens))), np.int64) for _ in INPUTS)
    for row, own in enumerate(tokens):
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
    return dict(zip(INPUTS, (ids, mask), strict=True))


class OnnxRuntime(ExportedModel):
    """ONNX Runtime; int8 is its own dynamic quantisation."""

    modules = ("onnxruntime", "tokenizers")

    def open_graph(self, graph: Path) -> None:
        if self.precision == "int8":
            graph = self.written(f"{graph.stem}-int8.onnx", lambda path: quantize(graph, path))
        options = self.package.SessionOptions()
        options.intra_op_num_threads = self.options["num_threads"]
        self.session = self.package.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def infer(self, batches: list[Inputs]) -> list[Any]:
        return [self.session.run(None, batch)[0] for batch in batches]


def quantize(graph: Path, path: str) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(graph, path, weight_type=QuantType.QInt8)


class OpenVino(ExportedModel):
    """OpenVINO: one batch in its latency mode, several in its throughput mode. Its default type depends on the CPU.

    int8: NNCF's quantisation of weights and activations, from a few calibration texts.
    """

    modules = ("openvino", "tokenizers")

    def open_graph(self, graph: Path) -> None:
        core = self.package.Core()
        if self.precision == "int8":
            graph = self.written(f"{graph.stem}-int8.xml", lambda path: self.quantize(core.read_model(graph), path))
        options = {"INFERENCE_PRECISION_HINT": "f32"} if self.precision == "float32" else {}
        if self.options["num_threads"]:
            options["INFERENCE_NUM_THREADS"] = self.options["num_threads"]
        self.latency, throughput = (
            core.compile_model(graph, "CPU", {**options, "PERFORMANCE_HINT": hint})
            for hint in ("LATENCY", "THROUGHPUT")
        )
        self.queue = self.package.AsyncInferQueue(throughput)

    def quantize(self, model: Any, path: str) -> None:
        import nncf

        draw = random.Random(20)
        texts = [random_text(draw, draw.randint(1, 250)) for _ in range(NUM_CALIBRATION_TEXTS)]
        samples = [make_inputs([found.ids]) for found in self.tokenizer.encode_batch(texts)]
        found = nncf.quantize(model, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER)
        self.package.save_model(found, path, compress_to_fp16=False)
        Path(path).with_suffix(".bin").rename(self.folder / f"{Path(self.source).name}-int8.bin")

    def infer(self, batches: list[Inputs]) -> list[Any]:
        if len(batches) == 1:
            return [self.latency(batches[0])[0]]
        found: dict[int, Any] = {}
        self.queue.set_callback(lambda request, place: found.update({place: request.get_output_tensor(0).data.copy()}))
        for place, batch in enumerate(batches):
            self.queue.start_async(batch, place)
        self.queue.wait_all()
        return [found[place] for place in range(len(batches))]


class Roofline(Engine):
    """What the machine can do."""

    modules = ("archerfish",)

    def load(self) -> None:
        pass

    def peaks(self) -> dict[str, float]:
        from archerfish.kernels.native.peaks import measure_peaks

        return measure_peaks()


if __name__ == "__main__":
    main(globals())
