"""`archerfish embed`: vectors of texts, as a table, as JSON or in a file."""

from __future__ import annotations

import argparse
import io
import json
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from archerfish.cli.options import Parser, add_options, section
from archerfish.cli.output import Output, seconds
from archerfish.cli.texts import gather_texts
from archerfish.config import EmbedConfig, HubConfig
from archerfish.engine.progress import shorten
from archerfish.errors import InvalidOptionError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from archerfish.engine.arrow_engine import ArrowEngine

    Vectors = npt.NDArray[np.float32]

MAX_ROWS = 20
MANY_TEXTS = 64  # with this many texts or more, a progress bar is shown


def add_embed_arguments(parser: Parser) -> None:
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts to embed")
    parser.add_argument(
        "--input", default="", metavar="FILE", help='a text per line, or .jsonl with "text"; - is stdin'
    )
    parser.add_argument(
        "--output", default="", metavar="FILE", help="write the vectors to FILE: .npy, .jsonl or .parquet"
    )
    parser.add_argument("--similarity", action="store_true", help="show the similarity of all pairs of texts")
    text = "vectors of length 1 (default: as the model)"
    parser.add_argument("--normalize", action=argparse.BooleanOptionalAction, default=None, help=text)
    parser.add_argument(
        "--prompt-name", default=None, metavar="NAME", help="prompt of the model to put before every text"
    )
    add_options(parser, EmbedConfig, HubConfig)


def open_engine(config: EmbedConfig, hub: HubConfig, out: Output) -> ArrowEngine:
    from archerfish.engine.arrow_engine import ArrowEngine

    with out.progress(f"Loading {config.model}") as progress:
        return ArrowEngine(config, hub=hub, progress=progress)


def run_embed(arguments: Namespace, out: Output) -> int:
    config, hub = section(EmbedConfig, arguments), section(HubConfig, arguments)
    texts = gather_texts(arguments.texts, arguments.input)
    if arguments.output:
        check_output(Path(arguments.output))
    with open_engine(config, hub, out) as engine:
        show_bar = len(texts) >= MANY_TEXTS and out.shows_progress
        started = time.perf_counter()
        options = {"normalize": arguments.normalize, "prompt_name": arguments.prompt_name}
        is_dense = engine.outputs[0] == "dense"
        if arguments.output and not is_dense and Path(arguments.output).suffix != ".jsonl":
            kind = engine.outputs[0].replace("_", "-")
            raise InvalidOptionError(f"{engine.model_name} gives {kind} vectors, which only a .jsonl file can hold.")
        vectors = engine.encode(texts, config.max_batch_size, show_bar, **options)
        elapsed_s = time.perf_counter() - started
        if arguments.output:
            write_vectors(Path(arguments.output), texts, vectors)
        report: dict[str, Any] = {
            "model": engine.model_name,
            "dimension": engine.get_embedding_dimension(),
            "num_texts": len(texts),
            "tokens": engine.count_tokens(texts),
            "load_s": engine.load_seconds,
            "seconds": elapsed_s,
        }
        cosines = None
        if arguments.similarity:
            cosines = cosine_matrix(vectors) if is_dense else engine.similarity(vectors, vectors)
    if out.as_json:
        report |= (
            {"output": arguments.output} if arguments.output else {"embeddings": [plain(vector) for vector in vectors]}
        )
        out.result(report if cosines is None else report | {"similarity": cosines.tolist()})
        return 0
    if cosines is not None or not arguments.output:
        show_table(out, texts, vectors, report["tokens"], cosines)
    rate = f", {len(texts) / elapsed_s:,.0f} texts/s" if len(texts) >= MANY_TEXTS else ""
    count = "1 text" if len(texts) == 1 else f"{len(texts):,} texts"
    out.note(
        f"{report['model']}: {count}, {sum(report['tokens']):,} tokens, dimension {report['dimension']}, "
        f"encoded in {seconds(elapsed_s)}{rate} (loaded in {seconds(report['load_s'])})"
    )
    if arguments.output:
        out.line(f"Wrote {arguments.output}")
    return 0


def show_table(out: Output, texts: list[str], vectors: Vectors, tokens: list[int], cosines: Vectors | None) -> None:
    """The first texts with the beginning of their vectors, or with their similarities."""
    shown = [shorten(text, width=48) for text in texts[:MAX_ROWS]]
    if cosines is not None:
        columns = [f"[{index}]" for index in range(len(shown))]
        rows = [
            (columns[i], text, *(f"{value:.3f}" for value in cosines[i, : len(shown)])) for i, text in enumerate(shown)
        ]
        out.table("", ("", "text", *columns), rows, numbers=columns)
    else:
        cells = [(text, *beginning(vectors[i]), tokens[i]) for i, text in enumerate(shown)]
        out.table("", ("text", "vector", "dimension", "tokens"), cells, numbers=("dimension", "tokens"))
    if len(texts) > MAX_ROWS:
        flags = "--output FILE or --json" if cosines is None else "--json"
        out.line(f"… and {len(texts) - MAX_ROWS:,} more ({flags} gives all)")


def beginning(vector: Any) -> tuple[str, str]:
    """The first numbers of a text's vector, sparse vector or vectors of tokens, and how many there are."""
    if hasattr(vector, "as_dict"):
        pairs = list(vector.as_dict().items())
        return ", ".join(f"{token_id}: {weight:.4f}" for token_id, weight in pairs[:4]) + ", …", f"{len(pairs)} weights"
    size = " x ".join(map(str, vector.shape))
    return ", ".join(f"{value:+.4f}" for value in vector.reshape(-1)[:4]) + ", …", size


def plain(vector: Any) -> Any:
    """A vector as JSON has it; of a sparse one, weights by token ids."""
    return (
        {str(key): value for key, value in vector.as_dict().items()} if hasattr(vector, "as_dict") else vector.tolist()
    )


def cosine_matrix(vectors: Vectors) -> Vectors:
    import numpy as np

    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return np.asarray(units @ units.T, np.float32)


def check_output(path: Path) -> None:
    """Raise an error when the output cannot be written, before anything is computed."""
    if path.suffix not in WRITERS:
        hint = did_you_mean(path.suffix, WRITERS, most=0)
        raise InvalidOptionError(f"The output {path} must end with one of: {', '.join(WRITERS)}.", hint=hint)
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a directory" if path.is_dir() else "lies in a directory that does not exist"
        raise InvalidOptionError(f"The output {path} {what}.")


def write_vectors(path: Path, texts: list[str], vectors: Vectors) -> None:
    """Create or replace a file, in the format of its suffix. After an error the old file is still there."""
    from archerfish.store.files import sibling, write_errors

    temporary = sibling(path, "tmp")
    with write_errors(path):
        try:
            with temporary.open("xb") as file:
                WRITERS[path.suffix](file, texts, vectors)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_npy(file: BinaryIO, texts: list[str], vectors: Vectors) -> None:
    import numpy as np

    np.save(file, vectors)


def write_jsonl(file: BinaryIO, texts: list[str], vectors: Vectors) -> None:
    with io.TextIOWrapper(file, encoding="utf-8", errors="surrogatepass", write_through=True) as lines:
        for text, vector in zip(texts, vectors, strict=True):
            lines.write(json.dumps({"text": text, "embedding": plain(vector)}, ensure_ascii=False) + "\n")


def write_parquet(file: BinaryIO, texts: list[str], vectors: Vectors) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    embeddings = pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()), "embedding": embeddings}), file)


WRITERS: dict[str, Callable[[BinaryIO, list[str], Any], None]] = {
    ".npy": write_npy,
    ".jsonl": write_jsonl,
    ".parquet": write_parquet,
}
