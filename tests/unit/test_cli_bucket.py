"""`tiering stat` of a bucket, real ones and one that fails; what other commands say of one."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memory_store import MemoryStore
from s3_servers import SECRET_KEY, SERVERS, Served
from scripted_s3 import Fault, ScriptedS3, slow_down
from test_cli import GOOD, WHOLE, columns
from tiering.cli import main
from tiering.cli.progress import Progress
from tiering.config import BucketConfig
from tiering.errors import TieringError
from tiering.keys import chunk_key
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import example_namespace
from tiering.tiers.obj.s3 import S3Store
from tiering.tiers.obj.store import Page
from tiering.tiers.obj.tier import ObjTier
from tiering.tiers.upkeep.buckets import BucketLook

Output = pytest.CaptureFixture[str]

CHUNK_BYTES = 8192
OBJECT_BYTES = 4096 + CHUNK_BYTES
NAMESPACE = example_namespace(model="acme/tiny", tp_size=2, share_bytes=CHUNK_BYTES, ranks=2)
OTHER = example_namespace(model="acme/other", share_bytes=CHUNK_BYTES)


def entry(served: Served, **keys: object) -> dict[str, Any]:
    return {"type": "obj", "store_config": served.store_config(), "prefix": "team/kv", **keys}


async def fill(served: Served, counts: tuple[int, int, int]) -> None:
    """Chunks of two ranks of one model and of another one, and what is none of ours."""
    config = BucketConfig(**served.store_config())  # type: ignore[arg-type]
    for namespace, rank, count in (
        (NAMESPACE, 0, counts[0]),
        (NAMESPACE, 1, counts[1]),
        (OTHER, 0, counts[2]),
    ):
        keys = [chunk_key(at.to_bytes(4, "big") * 8) for at in range(count)]
        store = S3Store(config)
        tier = ObjTier("obj", store, "team/kv", namespace, CHUNK_BYTES, rank=rank)
        await tier.open()
        await tier.write(keys, [memoryview(bytearray(CHUNK_BYTES))] * count)
        await tier.close()
    store = S3Store(config)
    await store.open()
    for name in ("team/kv/notes.txt", "team/kv-else/x", f"team/kv/{NAMESPACE.directory}_r0/stray"):
        await store.put_small(name, b"12345")
    await store.close()


@pytest.fixture
def scripted() -> Iterator[ScriptedS3]:
    with ScriptedS3() as server:
        yield server


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.slow) for kind in ("rclone", "seaweed")]
)
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    with SERVERS[request.param](tmp_path) as served:
        yield served


def checked(served: Served, capsys: Output, tmp_path: Path) -> None:
    """What `stat` shows of a bucket that was filled with 3, 2 and 1 chunks."""
    kv = tmp_path / "kv.json"
    kv.write_text(json.dumps({**GOOD, "secondary_tiers": [{"type": "fs"}, entry(served)]}))
    assert main(["stat", str(kv)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    first, second, *_ = out.splitlines()
    assert first == f"bucket/team/kv: 2 namespaces, 6 chunks, 72 KiB; {served.endpoint}"
    assert second.startswith("altogether 10 objects, ")
    assert second.endswith("; 1 of them, 5 B, in no namespace")
    table = columns(out)
    assert table["acme/tiny"][:5] == [NAMESPACE.digest.hex()[:12], "objects", "2", "5", "60 KiB"]
    assert table["acme/other"][1:5] == ["objects", "1", "1", "12 KiB"]
    assert "quarantined" not in table["model"]
    assert main(["stat", "--json", str(kv)]) == 0
    out, _ = capsys.readouterr()
    assert SECRET_KEY not in out
    told = json.loads(out)
    assert (told["root"], told["endpoint"]) == ("bucket/team/kv", served.endpoint)
    assert (told["chunks"], told["bytes"]) == (6, 6 * OBJECT_BYTES)
    assert (told["objects"], told["others"], told["other_bytes"]) == (10, 1, 5)
    other, tiny = sorted(told["namespaces"], key=lambda each: str(each["model"]))
    assert (tiny["directory"], tiny["ranks"]) == (NAMESPACE.directory, [0, 1])
    assert tiny["config"]["tokens_per_block"] == 16
    assert tiny["problems"] == other["problems"] == []
    assert told["disk_bytes"] == tiny["disk_bytes"] + other["disk_bytes"] + 5
    assert tiny["disk_bytes"] > tiny["bytes"] + 5
    now = time.time()
    assert now - 600 < tiny["oldest_mtime_seconds"] <= tiny["newest_mtime_seconds"] < now + 5


def test_stat_shows_what_a_real_bucket_holds(real: Served, capsys: Output, tmp_path: Path) -> None:
    asyncio.run(fill(real, (3, 2, 1)))
    checked(real, capsys, tmp_path)


def test_stat_takes_as_many_requests_as_there_are_pages(
    scripted: ScriptedS3, capsys: Output, tmp_path: Path
) -> None:
    served = Served(scripted.endpoint)
    asyncio.run(fill(served, (3, 2, 1)))
    scripted.asked.clear()
    checked(served, capsys, tmp_path)
    # Twice: one to see whether the bucket can be used, one page, and each config.json.
    assert scripted.count() == {"list": 4, "get": 4}
    name = next(name for name in scripted.objects if name.endswith(".bin"))
    for at in range(2500):
        scripted.objects[name.replace(".bin", f"-{at}")] = b""
    scripted.asked.clear()
    scripted.next(Fault(), slow_down(), slow_down("0.01"), Fault(reset=True), verb="list")
    assert main(["stat", json.dumps(entry(served))]) == 0
    assert "altogether 2510 objects" in capsys.readouterr().out
    assert scripted.count() == {"list": 1 + 3 + 3, "get": 2}


@pytest.mark.parametrize("form", ["tier alone", "engine's", "whole", "among others", "stdin"])
def test_stat_finds_the_bucket_in_a_configuration(
    form: str, scripted: ScriptedS3, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = entry(Served(scripted.endpoint))
    engine = {**GOOD, "secondary_tiers": [tier]}
    whole = {**WHOLE, "kv_connector_extra_config": engine}
    others = {"connectors": [{"kv_connector": "NixlConnector"}, whole]}
    texts = {
        "tier alone": tier,
        "engine's": engine,
        "whole": whole,
        "among others": {"kv_connector": "MultiConnector", "kv_connector_extra_config": others},
        "stdin": engine,
    }
    text = json.dumps(texts[form])
    if form == "stdin":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        text = "-"
    assert main(["stat", text]) == 0
    out = capsys.readouterr().out
    assert out.startswith("bucket/team/kv: 0 namespaces, 0 chunks, 0 B; http://127.0.0.1:")


def test_stat_says_what_is_wrong_in_one_sentence(
    scripted: ScriptedS3, capsys: Output, tmp_path: Path
) -> None:
    tier = entry(Served(scripted.endpoint))
    empty = tmp_path / "empty"
    empty.touch()

    def told(root: object) -> tuple[int, str]:
        code = main(["stat", root if isinstance(root, str) else json.dumps(root)])
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert SECRET_KEY not in err
        return code, err

    code, err = told({**GOOD, "secondary_tiers": [tier, tier]})
    assert (code, "2 tiers of type obj" in err, "alone" in err) == (2, True, True)
    assert told(GOOD)[0] == told(str(empty))[0] == told({"store_config": {}})[0] == 2
    code, err = told({**GOOD, "secondary_tiers": [{**tier, "store_config": {"bucket": "b"}}]})
    assert code == 2
    assert "secondary_tiers[0].store_config.endpoint_override = (absent)" in err
    code, err = told("s3://bucket/team/kv")
    assert (code, "configuration" in err) == (1, True)
    nowhere = {**tier["store_config"], "bucket": "none"}
    code, err = told({**GOOD, "secondary_tiers": [{**tier, "store_config": nowhere}]})
    assert code == 1
    assert "secondary_tiers[0].store_config.bucket = 'none': is no bucket" in err
    scripted.next(Fault(), Fault(status=403, code="AccessDenied"), verb="list")
    assert told(tier)[0] == 1


def test_stat_survives_a_description_that_cannot_be_read(
    scripted: ScriptedS3, capsys: Output
) -> None:
    served = Served(scripted.endpoint)
    asyncio.run(fill(served, (1, 1, 1)))
    config = f"team/kv/{OTHER.directory}/config.json"
    for body, problem in ((b"{", ""), (b"[]", ""), (b" " * (2 << 20), "too many for one")):
        scripted.objects[config] = body
        assert main(["stat", json.dumps(entry(served))]) == 0
        out = capsys.readouterr().out
        assert columns(out)["acme_other"][0] == OTHER.digest.hex()[:12]
        assert ("not looked into" in out) == bool(problem)
        assert problem in out
    scripted.script = lambda asked: Fault(status=403) if asked.name == config else None
    scripted.objects[config] = b"{}"
    assert main(["stat", json.dumps(entry(served))]) == 0
    assert "not looked into: GET team/kv/acme_other" in capsys.readouterr().out


async def test_a_listing_without_an_end_is_an_error() -> None:
    class Circle(MemoryStore):
        async def page(self, prefix: str, **about: object) -> Page:
            return Page([], "again")

    look = BucketLook(Circle(), "", ManualClock(), lambda count: None)
    with pytest.raises(TieringError, match="goes in circles"):
        await look.survey()


@pytest.mark.parametrize(("command", "instead"), [("verify", "each chunk"), ("gc", "lifecycle")])
def test_other_commands_say_what_to_do_for_a_bucket(
    command: str, instead: str, tmp_path: Path, capsys: Output
) -> None:
    kv = tmp_path / "kv.json"
    kv.write_text(json.dumps(GOOD))
    for root in (str(kv), json.dumps(GOOD), "s3://bucket/team/kv", "-"):
        assert main([command, root]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert err.startswith(f"tiering: {command} takes the root_dir of an fs tier; for a bucket")
        assert instead in err


def test_progress_without_a_total(capsys: Output) -> None:
    clock = ManualClock()
    with Progress("listing", "objects", None, clock) as progress:
        for done in range(25):
            progress.show(1000 * done)
            clock.advance(1)
    assert capsys.readouterr().err.splitlines() == [
        "listing: 10000 objects",
        "listing: 20000 objects",
    ]
