"""The engines that `archerfish bench embed` compares: ours and the peers. Runs inside the worker processes.

Nothing is imported here before `imports()` is called, because that is one of the things measured.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PeerOptions:
    """What every engine is given: the same source directory and the same machine."""

    source: str
    device: str = "cpu"
    num_threads: int = 0
    cache_dir: str = ""
    embed: dict[str, Any] = field(default_factory=dict)  # options of [embed], for us only


class Peer(Protocol):
    """One engine in one configuration."""

    name: str
    batch_sizes: tuple[int, ...]  # the first is its default

    def imports(self) -> str:
        """Import what the first encode needs; returns the version."""
        ...

    def load(self) -> None: ...

    def encode(self, texts: list[str], batch_size: int) -> Vectors: ...

    def weight_bytes(self) -> dict[str, int]:
        """Bytes that the weights occupy, by kind."""
        ...


class Archerfish:
    """ArrowEngine, with the options of the command line."""

    name = "archerfish"
    batch_sizes = (32,)

    def __init__(self, options: PeerOptions) -> None:
        self.options = options

    def imports(self) -> str:
        for module in ("torch", "tokenizers", "archerfish.engine.arrow_engine", "archerfish.store.loader"):
            importlib.import_module(module)
        import archerfish

        return archerfish.__version__

    def load(self) -> None:
        from archerfish import ArrowEngine, EmbedConfig, HubConfig

        config = EmbedConfig(**{**self.options.embed, "model": self.options.source})
        self.engine = ArrowEngine(config, hub=HubConfig(cache_dir=self.options.cache_dir))

    def encode(self, texts: list[str], batch_size: int) -> Vectors:
        return self.engine.encode(texts, batch_size)

    def weight_bytes(self) -> dict[str, int]:
        from archerfish.bench.memory import mapped_resident_bytes, tensor_bytes
        from archerfish.kernels.torch.cpu import lay_rows

        lay_rows.cache_clear()  # masks are not weights
        mapped = mapped_resident_bytes("weights.arrow")
        return {"mapped": mapped, "packed": tensor_bytes(mapped_file="weights.arrow")}


class SentenceTransformers:
    """sentence-transformers on torch."""

    batch_sizes = (32, 64, 128)

    def __init__(self, options: PeerOptions, dtype: str) -> None:
        self.options = options
        self.dtype = dtype
        self.name = f"st-{dtype}"
        if options.device == "cuda":
            self.batch_sizes = (32, 256, 1024)

    def imports(self) -> str:
        import sentence_transformers

        return str(sentence_transformers.__version__)

    def load(self) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        if self.options.num_threads:
            torch.set_num_threads(self.options.num_threads)
        self.model: Any = SentenceTransformer(
            self.options.source, device=self.options.device, model_kwargs={"dtype": getattr(torch, self.dtype)},
        )

    def encode(self, texts: list[str], batch_size: int) -> Vectors:
        import numpy as np

        return np.asarray(self.model.encode(texts, batch_size=batch_size, show_progress_bar=False), np.float32)

    def weight_bytes(self) -> dict[str, int]:
        return {"parameters": sum(p.numel() * p.element_size() for p in self.model.parameters())}


class Exported:
    """Common to peers that run an exported graph: texts sorted by length, padded per batch, pooled inside the graph."""

    batch_sizes: tuple[int, ...] = (32, 8)

    def __init__(self, options: PeerOptions) -> None:
        self.options = options

    def open_tokenizer(self) -> None:
        from tokenizers import Tokenizer

        from archerfish.store.source import read_embedding

        source = Path(self.options.source)
        embedding = read_embedding(source) or {}
        self.tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        self.tokenizer.enable_truncation(int(embedding.get("max_seq_length") or 512))
        self.tokenizer.no_padding()

    def batches(self, texts: list[str], batch_size: int) -> list[tuple[list[int], Any, Any]]:
        """(rows, ids, mask) of every batch, longest texts first."""
        import numpy as np

        token_ids = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        order = sorted(range(len(texts)), key=lambda row: -len(token_ids[row]))
        made = []
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            ids = np.zeros((len(rows), len(token_ids[rows[0]])), np.int64)
            mask = np.zeros_like(ids)
            for at, row in enumerate(rows):
                ids[at, : len(token_ids[row])] = token_ids[row]
                mask[at, : len(token_ids[row])] = 1
            made.append((rows, ids, mask))
        return made

    def exported_path(self, suffix: str) -> Path:
        from archerfish.bench.export import exported_path

        return exported_path(Path(self.options.source), Path(self.options.cache_dir), suffix)

    def weight_bytes(self) -> dict[str, int]:
        return {}


class OpenVino(Exported):
    """OpenVINO: bf16 in throughput mode for lists, in latency mode for single texts."""

    name = "openvino"

    def imports(self) -> str:
        import openvino

        importlib.import_module("tokenizers")
        return str(openvino.__version__)

    def load(self) -> None:
        import openvino

        from archerfish.bench.export import export_openvino

        self.open_tokenizer()
        path = self.exported_path(".xml")
        if not path.is_file():
            export_openvino(Path(self.options.source), path)
        self.core = openvino.Core()
        self.graph = self.core.read_model(path)
        self.compiled = self.compile("THROUGHPUT")
        self.queue = openvino.AsyncInferQueue(self.compiled)
        self.single: Any = None

    def compile(self, hint: str) -> Any:
        config: dict[str, Any] = {"PERFORMANCE_HINT": hint, "INFERENCE_PRECISION_HINT": self.precision()}
        if self.options.num_threads:
            config["INFERENCE_NUM_THREADS"] = self.options.num_threads
        return self.core.compile_model(self.graph, "CPU", config)

    def precision(self) -> str:
        capabilities = self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        return "bf16" if "BF16" in capabilities else "f32"

    def encode(self, texts: list[str], batch_size: int) -> Vectors:
        import numpy as np

        made = self.batches(texts, batch_size)
        if len(texts) == 1:
            if self.single is None:
                self.single = self.compile("LATENCY")
            return np.array(self.single({0: made[0][1], 1: made[0][2]})[0], np.float32)
        out = np.empty((len(texts), self.compiled.output(0).partial_shape[1].get_length()), np.float32)

        def keep(request: Any, rows: list[int]) -> None:
            out[rows] = request.get_output_tensor(0).data

        self.queue.set_callback(keep)
        for rows, ids, mask in made:
            self.queue.start_async({0: ids, 1: mask}, rows)
        self.queue.wait_all()
        return out


class OnnxRuntime(Exported):
    """ONNX Runtime, float32, all graph optimisations."""

    name = "onnx"

    def imports(self) -> str:
        import onnxruntime

        importlib.import_module("tokenizers")
        return str(onnxruntime.__version__)

    def load(self) -> None:
        import onnxruntime

        from archerfish.bench.export import export_onnx

        self.open_tokenizer()
        path = self.exported_path(".onnx")
        if not path.is_file():
            export_onnx(Path(self.options.source), path)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = self.options.num_threads
        self.session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])

    def encode(self, texts: list[str], batch_size: int) -> Vectors:
        import numpy as np

        made = self.batches(texts, batch_size)
        out: Vectors | None = None
        for rows, ids, mask in made:
            vectors = self.session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
            if out is None:
                out = np.empty((len(texts), vectors.shape[1]), np.float32)
            out[rows] = vectors
        return np.empty((0, 0), np.float32) if out is None else out


@dataclass(frozen=True)
class Engine:
    """An engine that can be asked for by its key."""

    key: str
    label: str
    needs: tuple[str, ...] = ()  # modules
    devices: tuple[str, ...] = ("cpu", "cuda")
    is_ours: bool = False
    by_default: bool = True
    dtype: str = ""  # that it needs products in, on a CPU

    def missing(self, device: str) -> str:
        """Why it cannot run here; empty if it can."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        if device == "cpu" and self.dtype:
            from archerfish.kernels.torch.cpu import is_available

            if not is_available(self.dtype):
                return f"this CPU has no products in {self.dtype}"
        return "" if device in self.devices else f"does not run on {device}"


DEVICES = ("cpu", "cuda", "mps", "auto")
ENGINES: dict[str, Engine] = {
    engine.key: engine
    for engine in (
        Engine("archerfish", "archerfish", devices=DEVICES, is_ours=True),
        Engine("archerfish-float32", "archerfish float32", devices=DEVICES, is_ours=True, by_default=False),
        Engine("st-float32", "sentence-transformers fp32", ("sentence_transformers",)),
        Engine("st-bfloat16", "sentence-transformers bf16", ("sentence_transformers",), dtype="bfloat16"),
        Engine("onnx", "ONNX Runtime fp32", ("onnxruntime", "onnx", "transformers"), ("cpu",)),
        Engine("openvino", "OpenVINO bf16", ("openvino", "transformers"), ("cpu",)),
    )
}
REFERENCE = "st-float32"


def make_peer(key: str, options: PeerOptions) -> Peer:
    """The engine of a key; KeyError for an unknown one."""
    makers: dict[str, Any] = {
        "archerfish": lambda: Archerfish(options),
        "archerfish-float32": lambda: Archerfish(replace(options, embed={**options.embed, "dtype": "float32"})),
        "st-float32": lambda: SentenceTransformers(options, "float32"),
        "st-bfloat16": lambda: SentenceTransformers(options, "bfloat16"),
        "onnx": lambda: OnnxRuntime(options),
        "openvino": lambda: OpenVino(options),
    }
    peer: Peer = makers[key]()
    return peer
