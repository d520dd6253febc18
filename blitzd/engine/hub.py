"""Models of the Hugging Face hub, named `hf:ORG/REPO` or `hf:ORG/REPO@REVISION`.

What is fetched lies in the hub client's own cache (HF_HOME, HF_HUB_CACHE), where other programs
find it too. Only what we read is fetched: configuration, tokenizer, chat template, safetensors.
The client resumes a file when the connection breaks; a file that is complete is not fetched
again. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are respected.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import blitzd
from blitzd.engine.bounded_files import MAX_TEXT
from blitzd.engine.catalogue import PullError
from blitzd.engine.hf_config import HfConfig
from blitzd.engine.safetensors_file import shard_names

# The client takes half a second to import, and most models are not from the hub.
if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

PREFIX = "hf:"
NEEDED = ("config.json", "tokenizer.json")
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

MAX_FILES = 10_000
"""Of a repository's top folder. A listing comes in pages, and says itself whether more come."""
AT_ONCE = 4
"""Files."""

_ID = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")


class HubId(NamedTuple):
    repo: str
    revision: str | None
    """A branch, a tag or a commit; None for the main branch."""

    @classmethod
    def parse(cls, name: str) -> HubId:
        found = _ID.fullmatch(name)
        if found is None or ".." in name:
            raise ValueError(f"{name!r} is no model id; hf:ORG/REPO or hf:ORG/REPO@REVISION is")
        return cls(found[1], found[2])

    def __str__(self) -> str:
        return PREFIX + self.repo + (f"@{self.revision}" if self.revision else "")


def name_of(directory: Path) -> str:
    """REPO for a directory of the hub client's cache, whose own name is a commit."""
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.split("--")[-1]
    return directory.name


def cached(name: str) -> Path | None:
    """The model's directory if all of it is here. Asks nobody."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import RevisionResolutionError

    wanted = HubId.parse(name)
    try:
        revision = _api().resolve_revision(
            wanted.repo, revision=wanted.revision, local_files_only=True
        )
    except RevisionResolutionError:
        return None
    found = try_to_load_from_cache(wanted.repo, NEEDED[0], revision=revision.resolved)
    if not isinstance(found, str):
        return None
    directory = Path(found).parent
    names = [*NEEDED, *_weights(directory)]
    return directory if all((directory / one).exists() for one in names) else None


class Unreachable(PullError):
    """Nobody answered, or not now; what is here may do."""


def pull(name: str) -> Path:
    """Fetches what is not here, checks weights against the hub's digests, returns the model's
    directory. A hub that cannot be reached is no matter when all of it is here.

    Raises PullError (what cannot be had, and what to try) and ValueError (not a name; a model
    that we cannot run, before its weights are fetched).
    """
    wanted = HubId.parse(name)
    try:
        with _explained(wanted):
            return _pull(wanted, _api())
    except Unreachable:
        if (here := cached(name)) is None:
            raise
        return here


def _pull(wanted: HubId, api: HfApi) -> Path:
    from huggingface_hub.hf_api import RepoFile

    # Fails at once where nobody answers; a listing would try for half a minute.
    api.model_info(wanted.repo, revision=wanted.revision)
    commit = api.resolve_revision(wanted.repo, revision=wanted.revision).resolved
    listing = list(islice(api.list_repo_tree(wanted.repo, revision=commit), MAX_FILES + 1))
    if len(listing) > MAX_FILES:
        raise PullError(f"{wanted} has more than {MAX_FILES} files in its top folder")
    files = {found.path: found for found in listing if isinstance(found, RepoFile)}
    _check_listing(wanted, files)
    small = [one for one in (*NEEDED, *OPTIONAL, INDEX) if one in files]
    if SINGLE in files and INDEX in small:
        small.remove(INDEX)
    directory = _fetch(api, wanted, commit, small)
    HfConfig(directory)
    weights = [SINGLE] if SINGLE in files else shard_names(directory / INDEX)
    if absent := [one for one in weights if one not in files]:
        raise PullError(f"{wanted}: {INDEX} names {absent[0]!r}, which is not there")
    _fetch(api, wanted, commit, weights)
    for one in weights:
        _verify(wanted, directory / one, files[one])
    return directory


def _check_listing(wanted: HubId, files: dict[str, RepoFile]) -> None:
    if SINGLE not in files and INDEX not in files:
        others = [one for one in files if one.endswith((".bin", ".pth", ".pt", ".gguf"))]
        has = f"it has {', '.join(sorted(others)[:5])}" if others else "and no other weights"
        raise PullError(
            f"{wanted} has no safetensors; {has} (a GGUF can be fetched by hand and given by path)"
        )
    for one in NEEDED:
        if one not in files:
            raise PullError(f"{wanted} has no {one}")
    for one in (*NEEDED, *OPTIONAL, INDEX):
        if one in files and files[one].size > MAX_TEXT:
            raise PullError(
                f"{wanted}: {one} has {files[one].size} bytes; at most {MAX_TEXT} are read"
            )


def _fetch(api: HfApi, wanted: HubId, commit: str, names: list[str]) -> Path:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        paths = list(
            pool.map(lambda one: api.hf_hub_download(wanted.repo, one, revision=commit), names)
        )
    return Path(paths[0]).parent


def _weights(directory: Path) -> list[str]:
    index = directory / INDEX
    if (directory / SINGLE).exists() or not index.exists():
        return [SINGLE]
    return shard_names(index)


def _verify(wanted: HubId, path: Path, listed: RepoFile) -> None:
    """Small files are in git itself, without a digest of this kind."""
    if listed.lfs is None:
        return
    with path.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != listed.lfs.sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise PullError(
            f"{wanted}: {path.name} came with sha256 {found}; the hub says {listed.lfs.sha256}; "
            "it was removed, pull again"
        )


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(library_name="blitzd", library_version=blitzd.__version__)


@contextmanager
def _explained(wanted: HubId) -> Iterator[None]:
    """The client's failures as PullError, with what can be done about each."""
    from huggingface_hub import constants, errors

    # Of whichever HTTP library the client has: connections refused, broken, timed out.
    transport: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    where = f"{constants.ENDPOINT}/{wanted.repo}"
    sign_in = "set HF_TOKEN or run `hf auth login`"
    try:
        yield
    except errors.GatedRepoError as error:
        raise PullError(
            f"{wanted} is gated: accept its terms at {where}, then {sign_in}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise PullError(
            f"{wanted}: no such repository at {where}; if it is private, {sign_in}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise PullError(f"{wanted}: no such revision at {where}") from error
    except errors.OfflineModeIsEnabled as error:
        raise Unreachable(
            f"{wanted} is not all here, and HF_HUB_OFFLINE forbids to ask for the rest"
        ) from error
    except errors.HfHubHTTPError as error:
        kind = Unreachable if error.response.status_code >= 500 else PullError
        raise kind(f"{wanted}: {where} answered: {_first(error)}") from error
    except (errors.RevisionResolutionError, transport, OSError) as error:
        raise Unreachable(f"{wanted}: cannot be fetched from {where}: {_first(error)}") from error


def _first(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
