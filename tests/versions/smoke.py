"""One vLLM, in process, with the connector: run by `run.py` with the Python of each environment.

`smoke.py MODEL ROOT PHASE` prints one line of JSON. Phase `store`: a prompt is computed, answered
from the device, from host memory, and written to ROOT. Phase `reload`, in another process: it
comes back from ROOT. Also what the connector misses in this vLLM, by `vllm_signatures`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

BLOCK = 32
CHUNKS = 20
TOKENS = 8
DEVICE_BYTES = 16 << 20
HOST_BYTES = 16 << 20
WRITTEN_SECONDS = 60.0


def started(model: Path, root: Path) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=2048,
        kv_cache_memory_bytes=DEVICE_BYTES,
        seed=0,
        kv_transfer_config=KVTransferConfig(
            kv_connector="TieredConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "cpu_bytes_to_use": HOST_BYTES,
                "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
            },
        ),
    )


def ask(llm: Any, prompt: list[int]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    (completion,) = output.outputs
    return {"tokens": list(completion.token_ids), "cached": output.num_cached_tokens or 0}


def wait_written(root: Path, chunks: int) -> int:
    deadline = time.monotonic() + WRITTEN_SECONDS
    while len(written := list(root.rglob("*.bin"))) < chunks and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(written)


def smoke(model: Path, root: Path, phase: str) -> dict[str, Any]:
    import vllm

    chance = random.Random(1)
    prompt = [chance.randrange(16, 4096) for _ in range(CHUNKS * BLOCK + 8)]
    llm = started(model, root)
    told: dict[str, Any] = {"version": vllm.__version__, "wanted": CHUNKS * BLOCK}
    if phase == "store":
        told["cold"] = ask(llm, prompt)
        told["device"] = ask(llm, prompt)
        if not llm.reset_prefix_cache():
            raise AssertionError("the device's cache could not be emptied")
        told["host"] = ask(llm, prompt)
        told["written"] = wait_written(root, CHUNKS)
        sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
        import vllm_signatures

        told["problems"] = vllm_signatures.problems()
    else:
        told["fs"] = ask(llm, prompt)
    return told


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    # Whatever else is printed goes to the log.
    os.dup2(2, 1)
    model, root, phase = sys.argv[1:]
    print(json.dumps(smoke(Path(model), Path(root), phase)), file=replies, flush=True)
    # Without the interpreter's own end, which takes seconds and is of no interest.
    os._exit(0)


if __name__ == "__main__":
    main()
