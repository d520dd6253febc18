"""An arena that fills up, checked section by section. No torch here."""

import asyncio
import contextlib
import mmap
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import xxhash

from blitzd.engine.coverage import Coverage
from blitzd.engine.errors import Corrupt
from blitzd.engine.layout import Section
from blitzd.engine.prepared import Prepared, open_model_file
from blitzd.engine.tokenizer import Tokenizer
from blitzd.fabric import SharedArena
from blitzd.fabric.arena import available_bytes
from blitzd.proto.blitzd.engine import v1 as pb


class Damaged(Corrupt):
    """A section that arrived is not what `model.json` says."""

    def __init__(self, section: Section, found: str, owners: set[str]) -> None:
        super().__init__(
            f"{section.name} from {', '.join(sorted(owners))} has digest {found}, model.json"
            f" says {section.digest}"
        )
        self.section = section
        self.owners = owners
        """Who brought bytes of it."""


class _Wait(NamedTuple):
    start: int
    end: int
    over: asyncio.Event


class Filling:
    """Made, and checked, in an event loop; `advance` may be called from any thread."""

    def __init__(self, directory: Path, shared: bool = False) -> None:
        """`directory` needs all of a prepared model but the weights. `shared`: other processes
        of this node may map the arena.

        Raises InvalidField (model_path), MemoryError.
        """
        self.directory = directory
        self.file = open_model_file(directory)
        size, available = self.file.layout.length, available_bytes()
        if size > available:
            raise MemoryError(
                f"weights of {size} bytes; accepted: at most {available}, what is free"
            )
        self.arena = SharedArena(size, name="blitzd-weights") if shared else None
        # On small pages: a guest whose free memory went back to the hypervisor pays for a fresh
        # huge one 30 times what the zeroing takes, in the way of the bytes.
        self.buffer = (
            mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if self.arena is None
            else self.arena.mapping
        )
        self.coverage = Coverage()
        self.source = ""
        """Which peer they come from now."""
        sections = self.file.layout.sections
        self._ends = [section.offset + section.length for section in sections]
        self._unchecked = list(range(len(sections)))
        self._moved = asyncio.Event()
        """A section may be whole."""
        self._waits: tuple[_Wait, ...] = ()
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
        return not self._unchecked

    def advance(self, start: int, end: int, owner: str) -> None:
        """[start, end) have arrived. Of one transfer, `start` stays and `end` moves."""
        before = self.coverage.reach(start)
        self.coverage.add(start, end, owner)
        after = self.coverage.reach(start)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if bisect_right(self._ends, before) != bisect_right(self._ends, after):
                self._loop.call_soon_threadsafe(self._moved.set)
            for wait in self._waits:
                if self.coverage.reach(wait.start) >= wait.end:
                    self._loop.call_soon_threadsafe(wait.over.set)

    async def until(self, start: int, end: int) -> None:
        """Returns when [start, end) are there."""
        wait = _Wait(start, end, asyncio.Event())
        self._waits += (wait,)
        try:
            # It may have come before anybody was told of the wait.
            if self.coverage.reach(start) < end:
                await wait.over.wait()
        finally:
            self._waits = tuple(one for one in self._waits if one is not wait)

    def rewind(self, section: Section) -> None:
        """Takes this section for not arrived. Nothing may be writing to it."""
        self.coverage.discard(section.offset, section.offset + section.length)

    async def check(
        self, tell: Callable[[pb.LoadProgress], None], due: Callable[[float], float]
    ) -> None:
        """Returns when `complete`, telling the watermark on the way. `due` says in how many
        seconds such a share of the whole may be told of. Raises Damaged."""
        sections = self.file.layout.sections
        while self._unchecked:
            index = await self._next_whole()
            section = sections[index]
            view = memoryview(self.buffer)[section.offset : self._ends[index]]
            found = await asyncio.to_thread(_digest, view)
            if found != section.digest:
                owners = self.coverage.owners(section.offset, self._ends[index])
                raise Damaged(section, found, owners)
            self._unchecked.remove(index)
            progress = self._progress()
            await asyncio.sleep(due(progress.bytes_loaded / self.size))
            tell(progress)

    async def _next_whole(self) -> int:
        """The first section that is there and was not checked."""
        while True:
            self._moved.clear()
            for index in self._unchecked:
                section = self.file.layout.sections[index]
                if self.coverage.reach(section.offset) >= self._ends[index]:
                    return index
            await self._moved.wait()

    def _progress(self) -> pb.LoadProgress:
        sections, layers = self.file.layout.sections, self.file.layout.layers
        # The embedding lies before the layers.
        ready = (self._unchecked[0] if self._unchecked else len(sections)) - 1
        return pb.LoadProgress(
            layers_ready=min(max(ready, 0), layers),
            layers_total=layers,
            bytes_loaded=self.size - sum(sections[index].length for index in self._unchecked),
            bytes_total=self.size,
            source=self.source,
        )

    def prepared(self, tokenizer: Tokenizer) -> Prepared:
        config, layout = self.file.config, self.file.layout
        return Prepared(self.directory, config, layout, self.buffer, tokenizer)


def _digest(view: memoryview) -> str:
    return xxhash.xxh3_128(view).hexdigest()
