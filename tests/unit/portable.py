"""With and without native code: what is done in C must come out the same where there is none."""

from __future__ import annotations

import pytest

from tiering_kernels import keytable, library, slots

KERNELS = ("native", "portable")


def use_kernel(kernel: str, patch: pytest.MonkeyPatch) -> None:
    """What is opened from now on is of this kind, until `patch` is undone."""
    if kernel == "portable":
        without_native(patch)
    else:
        assert library.kept() is not None, "build it: python hatch_build.py"


def without_native(patch: pytest.MonkeyPatch) -> None:
    for module in (keytable, slots):
        patch.setattr(module, "_native", lambda: None)
