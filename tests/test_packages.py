"""The wheel and the sdist, installed by pip alone into an environment of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from archerfish import __version__

ROOT = Path(__file__).parents[1]
PLAIN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
LEFT_OUT = shutil.ignore_patterns(
    ".venv*", ".*cache", "build", "dist", "*.so", "__pycache__", ".hypothesis", "node_modules"
)


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, words)], cwd=cwd, env=PLAIN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_wheel_and_sdist_install_with_pip_alone(tmp_path: Path) -> None:
    """Red: a file that the package needs and that the wheel or the sdist has not, or a dependency that is not
    stated."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    run(sys.executable, "-m", "venv", tmp_path / "builder", cwd=tmp_path)
    run(tmp_path / "builder/bin/pip", "install", "--quiet", "build", cwd=tmp_path)
    run(tmp_path / "builder/bin/python", "-m", "build", "--outdir", tmp_path / "dist", source, cwd=tmp_path)
    [wheel], [sdist] = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {f"archerfish/serve/web/{path.name}" for path in (ROOT / "archerfish/serve/web").iterdir()} <= names
    assert tops == {"archerfish", f"archerfish-{__version__}.dist-info"}
    for package in (wheel, sdist):
        check_install(package, tmp_path / package.name.rpartition(".")[2])


def check_install(package: Path, where: Path) -> None:
    venv.create(where, with_pip=True)
    run(where / "bin/pip", "install", "--quiet", package, cwd=where)
    archerfish = where / "bin/archerfish"
    found = json.loads(run(archerfish, "--json", "--version", cwd=where))
    assert (found["version"], found["torch"]) == (__version__, "") and found["instructions"]
    if (ROOT / ".git").exists():
        assert found["commit"]
    assert json.loads(run(archerfish, "doctor", "--json", cwd=where))["usable"]
    story = ["--model", "story-rwkv7", "--temperature", "0", "--max-tokens", "12"]
    assert run(archerfish, "generate", *story, "Once upon a time", cwd=where).startswith(", there was a little girl")
    assert len(run(archerfish, "chat", *story, "Hello", cwd=where).strip()) > 20
    serve = subprocess.run(
        [str(archerfish), "serve"], cwd=where, env=PLAIN, capture_output=True, text=True, check=False
    )
    assert serve.returncode == 5 and "archerfish[serve]" in serve.stderr
