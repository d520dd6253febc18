"""KV blocks: who counts on which, and which free ones still hold a known prefix."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

BLOCK_TOKENS = 64


class NoFreeBlocks(Exception):
    """More blocks were asked for than are free. Nothing was taken."""


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a full block, given that of the block before it (b"" for the first).

    It stands for the whole prefix up to the block's end. SHA-256, because prompts are chosen
    by strangers: with a weak hash two prompts could be made to share a block that only one
    of them computed.
    """
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest()


class BlockManager:
    """Hands out block ids in [0, blocks_total), counting references.

    A full block whose content is known is *published* under its chained digest. When its last
    reference goes it joins the free blocks but stays published until it is handed out again,
    oldest release first, so the prefix cache takes no memory of its own and nothing is copied.
    """

    def __init__(self, blocks_total: int, block_tokens: int = BLOCK_TOKENS) -> None:
        if blocks_total < 1 or block_tokens < 1:
            raise ValueError(
                f"blocks_total={blocks_total}, block_tokens={block_tokens}: both must be >= 1"
            )
        self.blocks_total = blocks_total
        self.block_tokens = block_tokens
        self._references = [0] * blocks_total
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks_total))
        self._published: dict[bytes, int] = {}
        self._digest_of: list[bytes | None] = [None] * blocks_total

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.blocks_total - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def references(self, block: int) -> int:
        return self._references[block]

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The published blocks of the longest known prefix of `digests`. Takes none."""
        found = []
        for digest in digests:
            block = self._published.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, shared: Sequence[int], fresh: int) -> list[int]:
        """References the `shared` blocks (from `match`) and `fresh` new ones.

        Returns the new ones. Raises NoFreeBlocks, changing nothing, when they do not all fit.
        """
        revived = [block for block in shared if self._references[block] == 0]
        if len(self._free) - len(revived) < fresh:
            raise NoFreeBlocks(f"{fresh} more blocks wanted, {len(self._free)} free")
        for block in revived:
            del self._free[block]
        for block in shared:
            self._references[block] += 1
        return [self._hand_out() for _ in range(fresh)]

    def _hand_out(self) -> int:
        block, _ = self._free.popitem(last=False)
        self.withdraw((block,))
        self._references[block] = 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """Says that `block`, referenced and full, holds the prefix `digest`.

        When another block holds it already that one stays the published one; two equal blocks
        come of two equal prompts computed in one step.
        """
        if self._digest_of[block] is None and digest not in self._published:
            self._published[digest] = block
            self._digest_of[block] = digest

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Takes them out of the prefix cache: what they hold is not to be used again."""
        for block in blocks:
            digest = self._digest_of[block]
            if digest is not None:
                del self._published[digest]
                self._digest_of[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one reference to each. The last ones are the first to be handed out
        again: a prefix is worth more than what follows it."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def audit(self, owners: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless exactly the references of `owners` are counted and all
        else is free."""
        counted = [0] * self.blocks_total
        for blocks in owners:
            for block in blocks:
                counted[block] += 1
        wrong = [b for b in range(self.blocks_total) if counted[b] != self._references[b]]
        if wrong:
            raise AssertionError(
                "blocks with wrong counts (id, owners, counted): "
                f"{[(b, counted[b], self._references[b]) for b in wrong[:8]]}"
            )
        unreferenced = {b for b in range(self.blocks_total) if counted[b] == 0}
        if unreferenced != self._free.keys():
            raise AssertionError(f"free list is off by {unreferenced ^ self._free.keys()}")
        if any(self._digest_of[b] != d for d, b in self._published.items()):
            raise AssertionError("a published digest names a block that was handed out again")
