"""`tiering stat` of a bucket, which a configuration names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from tiering import maintenance
from tiering.cli import exits, roots, stat, words
from tiering.cli.config import read_source, settings_in
from tiering.cli.progress import Progress
from tiering.clock import MonotonicClock
from tiering.config import ObjTierConfig, parse
from tiering.config.problems import Shown
from tiering.errors import ConfigError, TieringError
from tiering.maintenance import BucketSurvey

_WAY_OUT = (
    "give the configuration that names the bucket: the engine's or that of its tier of type obj, "
    "as a file, - for stdin, or a JSON text"
)


def run(arguments: argparse.Namespace) -> int:
    try:
        where, config = _tier_of(arguments.root)
    except ConfigError as error:
        print(f"tiering: {error}", file=sys.stderr)
        return exits.INVALID
    with Progress("listing", "objects", None, MonotonicClock()) as progress:
        found = maintenance.survey_bucket(config, where, progress.show)
    if arguments.json:
        words.print_json(_as_json(config, found))
    else:
        _print(config, found)
    return exits.OK


def _tier_of(source: str) -> tuple[str, ObjTierConfig]:
    """The one tier of type obj in the configuration that `source` stands for, and what comes before
    its keys there."""
    if roots.is_url(source):
        raise TieringError(f"{source} does not say how the bucket is reached; {_WAY_OUT}")
    text, _ = read_source(source)
    found = [tier for where, given in settings_in(text) for tier in _buckets(where, given)]
    if len(found) != 1:
        how_many = f"{words.count(len(found), 'tier')} of type obj"
        remedy = "give the one that is meant alone, with its store_config"
        raise ConfigError("secondary_tiers", Shown(how_many), "must have one of type obj", remedy)
    ((where, tier),) = found
    return f"{where}." if where else "", parse(ObjTierConfig, tier, where)


def _buckets(where: str, given: object) -> Iterator[tuple[str, object]]:
    """The tiers of type obj in an engine's settings, or the one that they are; with their paths."""
    if not isinstance(given, dict) or "store_config" in given:
        yield where, given
        return
    tiers = given.get("secondary_tiers")
    for at, tier in enumerate(tiers if isinstance(tiers, list) else ()):
        if isinstance(tier, dict) and tier.get("type") == "obj":
            yield f"{where}{'.' if where else ''}secondary_tiers[{at}]", tier


def _place(config: ObjTierConfig) -> str:
    bucket = config.store_config.bucket
    return f"{bucket}/{config.prefix}" if config.prefix else bucket


def _print(config: ObjTierConfig, found: BucketSurvey) -> None:
    place = words.printable(_place(config))
    print(f"{place}: {stat.held(found.namespaces)}; {config.store_config.endpoint}")
    all_told = f"{words.count(found.objects, 'object')}, {words.size(found.object_bytes)}"
    others = f"{found.others} of them, {words.size(found.other_bytes)}, in no namespace"
    print(f"altogether {all_told}; {others}")
    stat.print_namespaces(found.namespaces, on_disk=False)


def _as_json(config: ObjTierConfig, found: BucketSurvey) -> dict[str, object]:
    return {
        "root": words.printable(_place(config)),
        "endpoint": config.store_config.endpoint,
        "chunks": sum(each.chunks for each in found.namespaces),
        "bytes": sum(each.bytes for each in found.namespaces),
        "disk_bytes": found.object_bytes,
        "objects": found.objects,
        "others": found.others,
        "other_bytes": found.other_bytes,
        "namespaces": [stat.told(each) for each in found.namespaces],
    }
