"""Kernels compiled ahead by workers, counted, and moved between machines in an archive."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton
from triton.runtime.jit import JITFunction

from archerfish import __version__
from archerfish.cli.main import main
from archerfish.errors import ArcherfishError
from archerfish.kernels.triton import archive, compiling

FOLDER, LIST = "A" * 52, "0" * 32 + ".json"


def test_kernels_are_compiled_counted_and_moved(tmp_path: Path) -> None:
    """Each check of the script says what it is about."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling_script"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr[-3000:]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_archive(path: Path, files: dict[str, bytes], /, *, link: str = "", **changes: Any) -> Path:
    contents = {
        "archerfish": __version__,
        "triton": triton.__version__,
        "target": ["cuda", 90, 32],
        "lists": {LIST: {"00": "k"}},
        "files": sorted(files),
        **changes,
    }
    with tarfile.open(path, "w:gz") as made:
        for place, data in {archive.CONTENTS: json.dumps(contents).encode(), **files}.items():
            entry = tarfile.TarInfo(place)
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))
        if link:
            entry = tarfile.TarInfo(f"{FOLDER}/link")
            entry.type, entry.linkname = tarfile.SYMTYPE, link
            made.addfile(entry)
    return path


def test_import_names_the_files_of_a_kernel_where_they_are(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = "B" * 52 + "/__triton_launcher.cpython-312-x86_64-linux-gnu.so"
    files = {f"{FOLDER}/k.json": b"{}", f"{FOLDER}/k.cubin": b"code", launcher: b"library"}
    file = write_archive(tmp_path / "a.tar.gz", files)
    assert main(["kernels", "import", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"] == 1
    group = json.loads((cache / FOLDER / "__grp__k.json").read_text())["child_paths"]
    assert group == {name: str(cache / FOLDER / name) for name in ("k.json", "k.cubin")}
    assert (cache / FOLDER / "k.cubin").read_bytes() == b"code" and (cache / launcher).read_bytes() == b"library"
    assert json.loads((cache / "archerfish" / LIST).read_text()) == {"00": "k"}


@pytest.mark.parametrize(
    ("files", "changes", "words"),
    [
        ({"../outside": b"x"}, {}, "outside of the cache"),
        ({"/etc/outside": b"x"}, {}, "outside of the cache"),
        ({f"{FOLDER}/../../outside": b"x"}, {}, "outside of the cache"),
        ({f"{FOLDER}/k.json": b"x"}, {"lists": {"../outside.json": {}}}, "outside of the cache"),
        ({f"{FOLDER}/k.json": b"x"}, {"files": []}, "does not hold the files"),
        ({f"{FOLDER}/k.json": b"x"}, {"files": [f"{FOLDER}/k.cubin", f"{FOLDER}/k.json"]}, "does not hold the files"),
        ({f"{FOLDER}/k.json": b"x"}, {"link": f"{FOLDER}/../../x"}, "is no archive"),
        ({f"{FOLDER}/k.json": b"x"}, {"lists": {LIST: ["00"]}}, "does not hold the files"),
        ({f"{FOLDER}/k.json": b"x"}, {"target": None}, "is no archive"),
        ({f"{FOLDER}/k.json": b"x"}, {"lists": 5}, "is no archive"),
        ({f"{FOLDER}/k.json": b"x"}, {"triton": "1.0"}, "of another triton: 1.0, not"),
        ({f"{FOLDER}/k.json": b"x"}, {"archerfish": "9"}, "of another archerfish: 9, not"),
    ],
)
def test_import_refuses(
    files: dict[str, bytes], changes: dict[str, Any], words: str, cache: Path, tmp_path: Path
) -> None:
    file = write_archive(tmp_path / "a.tar.gz", files, **changes)
    with pytest.raises(ArcherfishError, match=words):
        archive.import_kernels(file)
    assert not cache.exists() and not list(tmp_path.glob("outside*"))


def test_models_that_rehearse_at_once_leave_torch_as_it_was() -> None:
    before = torch.empty, torch.empty_like, JITFunction.run
    inside, found = threading.Barrier(2), list[bool]()

    def rehearse() -> None:
        with compiling.rehearsing(compiling.Rehearsal(lambda job: None)):
            found.append(not torch.full_like(torch.empty(1000), 1.0).isnan().any() and not torch.empty(1000).any())

    def go_on() -> None:  # a thread that serves another model meanwhile
        with compiling.rehearsing(compiling.Rehearsal(lambda job: None)):
            inside.wait()
            inside.wait()

    other = threading.Thread(target=go_on)
    other.start()
    inside.wait()
    assert torch.empty(3, memory_format=torch.contiguous_format).shape == (3,)  # which zeros would not take
    waiting = threading.Thread(target=rehearse)
    waiting.start()
    inside.wait()
    for thread in (other, waiting):
        thread.join()
    assert found == [True] and (torch.empty, torch.empty_like, JITFunction.run) == before


def test_import_says_what_is_no_archive(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("hello")
    for name, words in (("text", "is no archive of kernels"), ("missing", "There is no file")):
        assert main(["kernels", "import", str(tmp_path / name)]) != 0
        assert words in capsys.readouterr().err


def test_export_needs_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.engine.tiny_llama import save_tiny_llama

    command = ["kernels", "export", str(save_tiny_llama(tmp_path)), str(tmp_path / "a"), "--load-format", "dummy"]
    assert main([*command, "--device", "cpu"]) != 0
    assert "compiles no kernels" in capsys.readouterr().err
