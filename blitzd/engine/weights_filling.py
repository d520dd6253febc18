"""An arena that fills up in canonical order, checked section by section. No torch here."""

import asyncio
import contextlib
import mmap
from collections.abc import Callable
from pathlib import Path

import xxhash

from blitzd.engine.errors import Corrupt
from blitzd.engine.layout import Section
from blitzd.engine.prepared import Prepared, open_model_file
from blitzd.engine.tokenizer import Tokenizer
from blitzd.fabric.arena import available_bytes
from blitzd.proto.blitzd.engine import v1 as pb


class Damaged(Corrupt):
    """A section that arrived is not what `model.json` says."""

    def __init__(self, section: Section, found: str, source: str) -> None:
        super().__init__(
            f"{section.name} from {source} has digest {found}, model.json says {section.digest}"
        )
        self.section = section


class Filling:
    """Made, and checked, in an event loop; `advance` may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        """`directory` needs all of a prepared model but the weights.

        Raises InvalidField (model_path), MemoryError.
        """
        self.directory = directory
        self.file = open_model_file(directory)
        size, available = self.file.layout.length, available_bytes()
        if size > available:
            raise MemoryError(
                f"weights of {size} bytes; accepted: at most {available}, what is free"
            )
        # On small pages: a guest whose free memory went back to the hypervisor pays for a fresh
        # huge one 30 times what the zeroing takes, in the way of the bytes.
        self.buffer = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.arrived = 0
        """So many of the first bytes are there."""
        self.source = ""
        """Which peer they come from now."""
        self._checked = 0
        """Sections."""
        self._wanted = 0
        self._moved = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def digest(self) -> str:
        return self.file.config.digest

    @property
    def size(self) -> int:
        return len(self.buffer)

    @property
    def complete(self) -> bool:
        """Every section is there and is what `model.json` says."""
        return self._checked == len(self.file.layout.sections)

    def advance(self, arrived: int) -> None:
        self.arrived = arrived
        if arrived >= self._wanted:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._moved.set)

    def rewind(self, section: Section) -> None:
        """Takes this section and what follows for not arrived. Nothing may be writing."""
        self.arrived = min(self.arrived, section.offset)

    async def check(
        self, tell: Callable[[pb.LoadProgress], None], due: Callable[[float], float]
    ) -> None:
        """Returns when `complete`, telling the watermark on the way. `due` says in how many
        seconds such a share of the whole may be told of. Raises Damaged."""
        sections = self.file.layout.sections
        while self._checked < len(sections):
            section = sections[self._checked]
            end = section.offset + section.length
            await self._until(end)
            view = memoryview(self.buffer)[section.offset : end]
            found = await asyncio.to_thread(_digest, view)
            if found != section.digest:
                raise Damaged(section, found, self.source)
            await asyncio.sleep(due(end / self.size))
            tell(self._progress(self._checked, end))
            self._checked += 1

    async def _until(self, end: int) -> None:
        self._wanted = end
        self._moved.clear()
        # It may have been set for an earlier section, more than once.
        while self.arrived < end:
            await self._moved.wait()
            self._moved.clear()

    def _progress(self, section: int, end: int) -> pb.LoadProgress:
        layers = self.file.layout.layers
        return pb.LoadProgress(
            layers_ready=min(section, layers),
            layers_total=layers,
            bytes_loaded=end,
            bytes_total=self.size,
            source=self.source,
        )

    def prepared(self, tokenizer: Tokenizer) -> Prepared:
        config, layout = self.file.config, self.file.layout
        return Prepared(self.directory, config, layout, self.buffer, tokenizer)


def _digest(view: memoryview) -> str:
    return xxhash.xxh3_128(view).hexdigest()
