"""What one machine gives to a run (`PeerConfig`): device, threads, transports, caps.

It stays on its machine and is read without torch, which an anchor does not have.
"""

from typing import Annotated, Literal

import msgspec

from weft.config import Config
from weft.errors import ConfigError
from weft.net.blobs.relay import RelayConfig
from weft.net.transport.iroh import IrohConfig
from weft.net.transport.tls import TlsConfig
from weft.run.caps import CapsConfig


class PeerConfig(Config, frozen=True, kw_only=True):
    """What this machine gives to a run. It stays here."""

    name: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[\w .@()+-]*\Z")] = ""
    device: Annotated[str, msgspec.Meta(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)\Z", description="where torch runs")] = (
        "auto"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of matrix products in the inner loop; auto: bf16 on a GPU that has it, else fp32."""
    micro_batch: Annotated[int, msgspec.Meta(ge=0, description="samples at a time; 0: as many as fit")] = 0
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024, description="of torch on the CPU; 0: its own choice")] = 0
    is_compiled: bool = False
    has_recompute: bool = False
    max_parameters: Annotated[int, msgspec.Meta(ge=1, description="larger models are refused")] = 20_000_000_000
    transports: Annotated[tuple[Literal["tls", "iroh", "via"], ...], msgspec.Meta(min_length=1)] = (
        "tls",
        "iroh",
        "via",
    )
    tls: TlsConfig = TlsConfig()
    iroh: IrohConfig = IrohConfig()
    relay: RelayConfig = RelayConfig()
    checkpoint_every_s: Annotated[float, msgspec.Meta(ge=0, description="seconds; 0: at the end only")] = 60.0
    is_blocking: bool = False
    """Where its line is slower than the run it joins, ask members to wait until it is in."""
    max_blocked_s: Annotated[float, msgspec.Meta(ge=0, le=86_400, description="seconds; 0: it waits for nobody")] = (
        600.0
    )
    """As long this machine waits for one newcomer that asks for it, at most."""
    caps: CapsConfig = CapsConfig()

    def __post_init__(self) -> None:
        if set(self.transports) == {"via"}:
            raise ConfigError(
                "transports is via alone, which leads through links of tls or iroh: name one of them, too."
            )

    @property
    def num_threads(self) -> int:
        """Threads of torch on the CPU, as many as the cores it may use at most; 0: its own choice."""
        return min(self.threads or self.caps.cores, self.caps.cores) if self.caps.cores else self.threads
