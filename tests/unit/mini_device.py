"""The device memory of one rank of the mini vLLM: what computing writes there, and what must be.

"Computing" a token writes its stamp: a hash of all tokens up to it, the epoch (the weights), and
of what is of its own layer, group and share. A group of recurrent states has the stamp of its
last token, read before each step and written after it. All groups lie on the same bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gated import GARBAGE
from mini_blocks import NULL_BLOCK, Request
from mini_groups import LAYERS, page_bytes, skipped_tokens
from tiering.device.base import HostPages
from tiering_connectors.vllm.geometry import Geometry
from tiering_connectors.vllm.groups import Kind


class RankDevice:
    """`share`: which share of a row this rank's bytes belong to; ranks of one share are alike."""

    def __init__(self, geometry: Geometry, share: int) -> None:
        self._groups = geometry.groups
        self._share = share
        width = max(map(page_bytes, geometry.groups))
        self._layers = [np.zeros((geometry.num_blocks, width), np.uint8) for _ in range(LAYERS)]
        self.pages = [
            HostPages([layer[:, : page_bytes(group)] for layer in self._layers], layout)
            for group, layout in zip(geometry.groups, geometry.shares, strict=True)
        ]

    def compute(self, request: Request, start: int, end: int, epoch: int) -> set[int]:
        """The tokens from `start` to before `end`; which blocks were written to."""
        written: set[int] = set()
        for at, group in enumerate(self._groups):
            table, size = request.blocks[at], group.tokens_per_block
            if group.kind is Kind.STATE:
                if start:
                    self._check_state(request, at, start, epoch)
                places = [(table[(end - 1) // size], 0)]
                stamps = _stamps(request, end - 1, end, epoch)
            else:
                places = [(table[token // size], token % size) for token in range(start, end)]
                stamps = _stamps(request, start, end, epoch)
            blocks, words = np.array(places).T
            assert NULL_BLOCK not in blocks, f"{request.request_id}: no block to compute into"
            for layer, pages in enumerate(self.pages[at].pages):
                pages.view(np.uint64)[blocks, words] = stamps + self._tag(at, layer)
            written.update(blocks.tolist())
        for layer in self._layers:
            layer[NULL_BLOCK] = GARBAGE
        return written

    def check(self, request: Request, start: int, end: int, epoch: int) -> None:
        """Whatever computing `start` and later tokens read is there, and right."""
        for at, group in enumerate(self._groups):
            if group.kind is Kind.STATE:
                self._check_state(request, at, end, epoch)
                continue
            size = group.tokens_per_block
            tokens = np.arange(skipped_tokens(group, start), end)
            blocks = np.array(request.blocks[at])[tokens // size]
            stamps = _stamps(request, int(tokens[0]), end, epoch)
            for layer, pages in enumerate(self.pages[at].pages):
                words = pages.view(np.uint64)[blocks, tokens % size]
                wrong = tokens[words != stamps + self._tag(at, layer)]
                told = f"{request.request_id}: wrong KV in group {at} at tokens {wrong.tolist()}"
                assert not len(wrong), told

    def _check_state(self, request: Request, at: int, end: int, epoch: int) -> None:
        group = self._groups[at]
        block = request.blocks[at][(end - 1) // group.tokens_per_block]
        stamp = _stamps(request, end - 1, end, epoch)
        for layer, pages in enumerate(self.pages[at].pages):
            word = pages.view(np.uint64)[block, 0]
            told = f"{request.request_id}: wrong state in group {at} after {end} tokens"
            assert block != NULL_BLOCK, told
            assert word == stamp[0] + self._tag(at, layer), told

    def _tag(self, at: int, layer: int) -> np.uint64:
        return np.uint64((self._share * len(self._groups) + at) * LAYERS + layer)


def _stamps(request: Request, start: int, end: int, epoch: int) -> npt.NDArray[np.uint64]:
    return np.array(request.stamps(start, end, epoch), np.uint64)
