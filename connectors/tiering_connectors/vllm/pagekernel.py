"""The Triton kernel for small pages, as a copier wants it.

Imports torch and Triton when one is made, and nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tiering.device.base import BlockMap, DevicePages
from tiering.errors import DeviceCallError


class TranslatingKernel:
    """`PageKernel` over the Triton kernel: whatever launching raises is a DeviceCallError."""

    def __init__(self, pages: Any) -> None:
        self._pages = pages

    def warm_up(self) -> None:
        """Compile what a copy needs, which takes seconds; raises what that raises."""
        self._pages.warm_up()

    def can_copy(self, group: int) -> bool:
        return bool(self._pages.can_copy(group))

    def launch(self, blocks: BlockMap, stream: int, *, is_load: bool) -> object:
        try:
            return self._pages.launch(blocks, stream, is_load=is_load)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise DeviceCallError("the kernel for small pages", -1, told) from error


def page_kernel(
    groups: Sequence[DevicePages], share: npt.NDArray[np.uint8], device: str
) -> TranslatingKernel:
    """The Triton kernel for these groups and this share of the rows (uint8, `(rows, share_bytes)`);
    raises whatever importing torch and Triton raises."""
    from tiering_kernels.triton_pages import Layer, PageTable, TritonPages

    tables = [
        PageTable(
            layers=[
                Layer(run.address, run.stride, run.page_bytes, offset)
                for run, offset in zip(group.pages, group.layout.layer_offsets, strict=True)
            ],
            blocks=min((run.blocks for run in group.pages), default=0),
            per_chunk=group.layout.blocks_per_chunk,
            rows=len(share),
            row_address=share.ctypes.data,
            row_stride=share.strides[0],
        )
        for group in groups
    ]
    return TranslatingKernel(TritonPages(tables, device))
