"""The peer-to-peer tier's keys: where this engine is reached by others, how, and by whom.

Owns what makes host, port and transport fit together, and what the environment says in place of
keys that are left out. The names and defaults that vLLM has are vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from tiering.config.anytier import TierSettings
from tiering.config.fields import DAY_SECONDS, Text, absolute_file, listed
from tiering.config.problems import refused
from tiering.errors import ConfigError
from tiering.peers.addresses import PORT_MAX, Address, address

HOST_VARIABLE = "VLLM_P2P_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_P2P_SIDE_CHANNEL_PORT"
HOST_DEFAULT = "localhost"
PORT_DEFAULT = 5710


def _host(host: str) -> str:
    try:
        address("host", host, 0)
    except ConfigError as error:
        raise refused(error.reason, error.remedy) from None
    return host


Host = Annotated[Text, AfterValidator(_host)]
KeyFile = Annotated[
    Text, Field(min_length=1), AfterValidator(absolute_file("/etc/kv-tiering/peers.key"))
]


class P2pTierConfig(TierSettings):
    """Other engines' host memory as a secondary tier, and this engine's for them."""

    # Written out in JSON, where it says which tier is meant; the class says it in Python.
    model_config = ConfigDict(json_schema_extra={"required": ["type"]})

    # Nothing is stored here, and each engine announces itself what it holds.
    enable_kv_events: ClassVar[bool] = False
    event_medium: ClassVar[None] = None
    backpressure: ClassVar[None] = None

    type: Literal["p2p"] = Field(default="p2p", description="Kind of tier.", examples=["p2p"])
    host: Host | None = Field(
        default=None,
        description="Name or address that this engine is reached at by peers: what requests that "
        "are to have chunks from it name as remote_host. Left out, VLLM_P2P_SIDE_CHANNEL_HOST, "
        "else localhost, which other hosts cannot reach.",
        examples=["10.0.0.7"],
    )
    port: int | None = Field(
        default=None,
        ge=1,
        le=PORT_MAX,
        description="Port of data-parallel rank 0; each other rank has this one plus its rank. "
        "Left out, VLLM_P2P_SIDE_CHANNEL_PORT, else 5710.",
        examples=[5711],
    )
    advertised_host: Host | None = Field(
        default=None,
        description="What peers are told to dial for the chunks themselves, where that is not "
        "host: needed where host is 0.0.0.0 or ::.",
        examples=["10.0.0.7"],
    )
    transport: Literal["auto", "nixl", "tcp", "shm"] = Field(
        default="auto",
        description="What moves the chunks: shm between engines of one host, nixl over RDMA, tcp "
        "over any network; auto takes the first of these that two engines both have, nixl only "
        "where it is installed and the host has InfiniBand or RoCE.",
        examples=["tcp"],
    )
    backends: Annotated[tuple[Text, ...], BeforeValidator(listed)] = Field(
        default=("UCX",),
        min_length=1,
        description="NIXL's backends, for transport nixl.",
        examples=[["UCX"]],
    )
    num_threads: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Threads of NIXL's agent, where backends is UCX alone. Each makes the start "
        "longer, and has a connection of its own to each peer.",
        examples=[8],
    )
    auth: KeyFile | None = Field(
        default=None,
        description="File with a key that all peers share, as an absolute path: only who has it "
        "is served. It authenticates and does not encrypt.",
        examples=["/etc/kv-tiering/peers.key"],
    )
    allow_unauthenticated: bool = Field(
        default=False,
        description="Bind a host that others can reach without auth: whoever reaches it can read "
        "the KV cache.",
        examples=[True],
    )
    unbound_store_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=DAY_SECONDS,
        allow_inf_nan=False,
        description="Seconds for which a prefiller keeps what it has computed for a decoder that "
        "has not come yet.",
        examples=[120.0],
    )
    peers_max: int = Field(
        default=128,
        ge=1,
        le=65536,
        description="Most engines that this one has sessions with to have chunks from them.",
        examples=[32],
    )
    guests_max: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Most engines that have sessions with this one to have chunks from it.",
        examples=[64],
    )

    def bound(self, where: str, rank: int, environment: Mapping[str, str]) -> Address:
        """Where data-parallel replica `rank` is reached. ConfigError for what `environment` says
        in place of keys that are left out, or under `where`, the tier's path."""
        host, port, key = self.host, self.port, f"{where}.host"
        if host is None and (host := environment.get(HOST_VARIABLE) or None) is not None:
            key = HOST_VARIABLE
        if port is None and (told := environment.get(PORT_VARIABLE)):
            if not (told.isascii() and told.isdigit() and 0 < int(told) <= PORT_MAX):
                raise ConfigError(
                    PORT_VARIABLE, told, "is no port", f"write one from 1 to {PORT_MAX}"
                )
            port = int(told)
        return address(key, host or HOST_DEFAULT, port or PORT_DEFAULT, rank)
