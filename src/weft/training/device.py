"""Where and how this machine computes: device, precision, threads, and whether a run fits into its memory.

    choose(peer) -> Device          auto: CUDA, else Apple's GPU, else the CPU
    check_fits(run, peer, device)   samples at a time that should fit; refuses up front what cannot, with the figures
    is_out_of_memory(error)         whether torch says, in one of its many ways, that memory ran out
    with allocating("...", device)  the same as an `OutOfMemory`, where nothing smaller can be tried

A CPU's memory must be counted before it is used: Linux promises more than it has and then kills. A GPU says when it is
full, so there the trainer starts with the whole batch and halves.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from msgspec import UNSET
from torch import Tensor, dtype

from weft.cost import training as cost
from weft.cost.pipeline import BASE_NBYTES
from weft.errors import ConfigError, OutOfMemory, TooLarge
from weft.model.adapter import adapted
from weft.model.config import ModelConfig, has_base, num_base_parameters, num_parameters
from weft.model.flat import held_nbytes
from weft.model.held import Numbers
from weft.model.sections import Section, whole
from weft.pipeline.codec.activations import BY_DEFAULT, ActivationConfig
from weft.run.config import DpoConfig, Genesis, LoopConfig, RunConfig
from weft.run.host import gigabytes, host_free_nbytes, process_nbytes
from weft.run.machine import CapsConfig, PeerConfig
from weft.run.staged import StagedConfig
from weft.run.trust import AuditedTrust
from weft.sync.costs import audit_memory_nbytes, peer_memory
from weft.sync.costs import evidence_nbytes as evidence_of
from weft.texts.section import codec_of, kind_with
from weft.training.text_memory import TextMemory, answer_memory, text_memory

Precision = Literal["fp32", "bf16", "fp16"]

# A run does not say how many will train; memory falls slowly with their number, and about so many are usual.
_ASSUMED_PEERS = 4


@dataclass(frozen=True)
class Device:
    """What torch computes on."""

    torch: torch.device
    precision: Precision
    name: str  # for people

    @property
    def is_cpu(self) -> bool:
        return self.torch.type == "cpu"

    @property
    def autocast_dtype(self) -> "dtype | None":
        """What matrix products are computed in; None: as the parameters are."""
        return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which matrix products are computed so."""
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.torch.type, dtype)

    def release_cache(self) -> None:
        """Give back what torch's allocator keeps for later, so that differently sized tensors find room."""
        if self.torch.type == "cuda":
            torch.cuda.empty_cache()
        elif self.torch.type == "mps":
            torch.mps.empty_cache()


def choose(peer: PeerConfig) -> Device:
    """Return device and precision that `peer` asks for, each resolved where it is "auto".

    Raises:
        ConfigError: a device this machine, or this build of torch, does not have.
    """
    device = torch.device(best() if peer.device == "auto" else peer.device)
    if device.type == "cuda":
        _require_cuda(device)
        device = torch.device("cuda", device.index or 0)  # parts of torch take none without a number
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError('peer.device: "mps" needs an Apple GPU and a torch built for it. Set device = "cpu".')
    match peer.precision:
        case "auto":
            has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
            precision: Precision = "bf16" if has_bf16 else "fp32"
        case chosen:
            precision = chosen
    return Device(device, precision, _name(device))


def to_host(tensor: Tensor) -> Tensor:
    """Return what is on a device in main memory; what lies there already is returned itself.

    All threads touch the new memory before it is written: touched by the one that copies, it takes as long as nine
    copies (3.9 GB: 2.64 s of 2.92, H100).
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu").zero_().copy_(tensor)


def best() -> str:
    """Return what "auto" means on this machine."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _require_cuda(device: torch.device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(
            f'peer.device: "{device}" is not there: this torch ({torch.__version__}) sees {count} CUDA devices. Set '
            'device = "auto" (--device auto), or install a torch build that fits the driver (`weft doctor` says which).'
        )


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"cpu, threads: {torch.get_num_threads()}" if device.type == "cpu" else str(device)


# --- memory ---


@dataclass(frozen=True, kw_only=True)
class Share:
    """How much of what a peer needs lies on one machine, and on one of its devices."""

    host: float = 1.0
    device: float = 1.0


ALL = Share()


def as_audited(run: RunConfig, peer: PeerConfig) -> PeerConfig:
    """Return the machine's settings with those that the run has for all, where its members audit each other.

    Raises:
        ConfigError: the machine's own contradict them.
    """
    trust = run.trust
    if not isinstance(trust, AuditedTrust) or isinstance(run, StagedConfig):  # sections are computed in fp32
        return peer
    micro_batch = min(trust.micro_batch or run.train.batch_size, run.train.batch_size)
    precision = "fp32" if trust.numerics == "exact" else trust.numerics
    told = (
        ("precision", peer.precision not in ("auto", precision), f'"{precision}" (--precision)'),
        ("micro_batch", peer.micro_batch not in (0, micro_batch), f"{micro_batch} (--micro-batch)"),
        ("base_numbers", peer.base_numbers not in ("auto", "fp32", "bf16"), '"auto"'),
        ("is_compiled", peer.is_compiled, "false"),
        ("device", trust.is_exact and peer.device not in ("auto", "cpu"), '"cpu" (--device)'),
    )
    for name, is_other, right in told:
        if is_other:
            raise ConfigError(
                f"{name}: members of this run do each other's training steps again, and have to compute alike. Set "
                f"{name} to {right}, or leave it out."
            )
    device = "cpu" if trust.is_exact else peer.device  # on GPUs exact numbers have not been tried
    return msgspec.structs.replace(peer, precision=precision, micro_batch=micro_batch, device=device)


def is_exact(run: RunConfig) -> bool:
    """Return whether a run's training steps are computed in exact numbers."""
    return isinstance(run.trust, AuditedTrust) and run.trust.is_exact


def check_fits(run: RunConfig, peer: PeerConfig, device: Device, share: Share = ALL) -> int:
    """Return how many samples at a time should fit: on a CPU by the closed forms, on a GPU all of a batch.

    Raises:
        TooLarge: not even one sample at a time fits beside the model, on the device or on the host; says the figures.
        ConfigError: as `as_audited`.
    """
    peer, is_fixed = as_audited(run, peer), isinstance(run.trust, AuditedTrust)
    if is_exact(run):
        device = choose(peer)
    micro_batch = min(peer.micro_batch or run.train.batch_size, run.train.batch_size)
    free = free_nbytes(peer.caps, device)
    if device.is_cpu and not is_fixed:
        while micro_batch > 1 and not fits(_shared(needed_nbytes(run, peer, device, micro_batch), share), free):
            micro_batch //= 2
    needed = _shared(needed_nbytes(run, peer, device, micro_batch if is_fixed else 1), share)
    if not fits(needed, free):
        raise TooLarge(_too_large(run, needed, free, peer))
    return micro_batch


def free_nbytes(caps: CapsConfig, device: Device) -> dict[str, int]:
    """Return the bytes that this machine may still take, by place: "cpu", and the device where it is another."""
    free = {"cpu": _within(caps.memory_nbytes, host_free_nbytes(), process_nbytes)}
    if not device.is_cpu:
        left = _within(caps.vram_nbytes, device_free_nbytes(device), lambda: device_taken_nbytes(device))
        free[str(device.torch)] = left
    return free


def _shared(needed: dict[str, int], share: Share) -> dict[str, int]:
    return {place: int(nbytes * (share.host if place == "cpu" else share.device)) for place, nbytes in needed.items()}


def _within(cap_nbytes: int | None, free: int, taken: Callable[[], int]) -> int:
    """Return what is free, or what the owner's cap leaves of it."""
    return free if cap_nbytes is None else min(free, cap_nbytes - taken())


def fits(needed: Mapping[str, int], free: Mapping[str, int]) -> bool:
    """Return whether there is room for what is needed, place by place."""
    return all(nbytes <= cost.SPARE * free[place] for place, nbytes in needed.items())


def check_fits_loop(run: LoopConfig, peer: PeerConfig) -> None:
    """Refuse a run of which this machine cannot hold what is kept beside a loop of its own, which holds the model.

    Raises:
        TooLarge: says the figures.
    """
    num, needed = run.num_parameters, beside_loop_nbytes(run)
    free = _within(peer.caps.memory_nbytes, host_free_nbytes(), process_nbytes)
    if needed > cost.SPARE * free:
        raise TooLarge(
            f"the run has {num:,} numbers, for which {gigabytes(needed)} are needed beside the model, and "
            f"{gigabytes(free)} are free. Close other programs, or use a larger machine."
        )


def beside_loop_nbytes(run: LoopConfig) -> int:
    """Return the bytes of main memory that a peer takes at its peak beside a loop of its own, which holds the model."""
    memory = peer_memory(
        run.method,
        None,
        run.vector.tensors,
        run.num_parameters,
        _ASSUMED_PEERS,
        num_rounds=-(-run.samples // run.settings.quota),
        activations=0,
    )
    return memory.peak_nbytes - memory.gradient


def needed_nbytes(run: RunConfig, peer: PeerConfig, device: Device, micro_batch: int) -> dict[str, int]:
    """Return the bytes a member of `run` needs at its peak, on the host ("cpu") and on its device, by place."""
    memory = peer_memory(
        run.method,
        run.train.optimizer,
        run.vector.tensors,
        run.num_parameters,
        _ASSUMED_PEERS,
        num_rounds=-(-run.train.tokens // (run.quota * run.train.seq_len)),  # alone; with others there are fewer
        activations=_activation_nbytes(run, peer, device, micro_batch),
    )
    numbers = base_numbers(run, peer, device)
    needed = with_base(by_place(memory, device), run.model, whole(run.model), numbers, device)
    if isinstance(run.train.loss, DpoConfig):
        for place in needed:
            needed[place] += cost.vector_nbytes(run.num_parameters)
    needed["cpu"] += audits_nbytes(run)
    if run.reward is not UNSET:
        needed = _with(needed, answer_memory(run.model, device.torch, run.train.seq_len), device)
    return with_texts(needed, run.model, whole(run.model), BY_DEFAULT, device, peer.serve_nbytes)


def audits_nbytes(run: Genesis) -> int:
    """Return the bytes of main memory that audits take of a member at most; nothing in a run that has none."""
    trust = run.trust
    if not isinstance(run, RunConfig) or not isinstance(trust, AuditedTrust) or isinstance(run, StagedConfig):
        return 0
    return audit_memory_nbytes(
        run.method,
        run.train.optimizer,
        run.vector.tensors,
        run.num_parameters,
        _ASSUMED_PEERS,
        rate=trust.audit_rate,
        has_gradient=trust.signs_gradients,
    )


def evidence_nbytes(run: Genesis) -> int:
    """Return the bytes of main memory beside that, which a member takes if it has them where a fault was found
    (`weft.sync.costs.evidence_nbytes`)."""
    trust = run.trust
    if not isinstance(run, RunConfig) or not isinstance(trust, AuditedTrust) or run.data.has_rows:
        return 0
    if not trust.signs_gradients:
        return 0
    samples = run.train.batch_size
    return evidence_of(run.model, run.method, samples, run.train.seq_len, trust.micro_batch or samples)


def _activation_nbytes(run: RunConfig, peer: PeerConfig, device: Device, micro_batch: int) -> int:
    shape, seq_len, has_rows = decoder(run.model), run.train.seq_len, run.data.has_rows
    if is_exact(run):
        return cost.exact_activation_nbytes(
            shape, micro_batch, seq_len, has_recompute=peer.has_recompute, has_rows=has_rows
        )
    return cost.activation_nbytes(
        shape,
        micro_batch,
        seq_len,
        is_half=device.precision != "fp32",
        has_recompute=peer.has_recompute,
        has_rows=has_rows,
        num_thinned=thinned(run.model),
    )


def base_numbers(run: RunConfig, peer: PeerConfig, device: Device) -> Numbers:
    """Return how this machine holds what the run's adapter goes beside."""
    if peer.base_numbers != "auto":
        return peer.base_numbers
    is_half = run.base_nbytes == 2 * num_base_parameters(run.model)
    return "bf16" if is_half and device.torch.type == "cuda" else "fp32"


def with_base(
    needed: dict[str, int], model: ModelConfig, section: Section, numbers: Numbers, device: Device
) -> dict[str, int]:
    """Return what a member needs with what its section's adapter goes beside; by place.

    The host reads it in fp32 first; on the device it is as it is held.
    """
    if not has_base(model):
        return needed
    held, first = (held_nbytes(model, section, each) for each in (numbers, "fp32"))
    on_host = first + (held if device.is_cpu and numbers != "fp32" else 0)
    return {place: num + (on_host if place == "cpu" else held) for place, num in needed.items()}


def with_texts(
    needed: dict[str, int],
    model: ModelConfig,
    section: Section,
    activations: ActivationConfig,
    device: Device,
    serve_nbytes: int,
) -> dict[str, int]:
    """Return what a member needs that draws texts, too, as its settings' `serve_nbytes` says; by place.

    Args:
        activations: between stages.
    """
    if not serve_nbytes:
        return needed
    kind = kind_with(codec_of(activations), device.torch)
    taken = text_memory(model, section, kind, device.torch, serve_nbytes)
    return _with(needed, taken, device)


def _with(needed: dict[str, int], taken: TextMemory, device: Device) -> dict[str, int]:
    found = Counter(needed)
    found["cpu"] += taken.host
    found["cpu" if device.is_cpu else str(device.torch)] += taken.device
    return dict(found)


def program_nbytes(device: Device) -> int:
    """Return the bytes of main memory that the program itself takes, beside what `needed_nbytes` says: Python, torch.

    One figure before anything is trained or timed, so that all who tell of a run's memory tell the same.
    """
    return BASE_NBYTES if device.is_cpu else max(BASE_NBYTES, process_nbytes())  # with a GPU's context it is more


def by_place(memory: cost.Memory, device: Device) -> dict[str, int]:
    """Return the bytes of `memory` on the host ("cpu") and on the device."""
    if device.is_cpu:
        return {"cpu": memory.on_cpu}
    on_device, on_host = memory.on_gpu
    if device.torch.type == "mps":
        on_host += on_device  # one memory for both
    return {"cpu": on_host, str(device.torch): on_device}


def figures(needed: Mapping[str, int], free: Mapping[str, int]) -> str:
    """Return both in words, place by place."""
    names = {place: "this machine" if place == "cpu" else place for place in needed}
    return "; ".join(
        f"{names[place]}: {gigabytes(nbytes)} needed, {gigabytes(max(0, free[place]))} free"
        for place, nbytes in needed.items()
    )


def _too_large(run: RunConfig, needed: dict[str, int], free: dict[str, int], peer: PeerConfig) -> str:
    caps = peer.caps
    texts = "lower serve_nbytes, " if peer.serve_nbytes else ""
    close = "Close" if caps.memory_nbytes is None and caps.vram_nbytes is None else "Raise --memory or --vram, close"
    base = num_base_parameters(run.model)
    adapter = f", its adapter {run.num_parameters:,}," if base else ""
    audits = f", {gigabytes(audits_nbytes(run))} of it for audits" if audits_nbytes(run) else ""
    return (
        f"the model has {base or run.num_parameters:,} parameters{adapter} and does not fit, even with one sample of "
        f"{run.train.seq_len} tokens at a time. {figures(needed, free)}{audits}. {close} other programs, {texts}set "
        "has_recompute = true or a half precision, choose a smaller model, or join from a larger machine."
    )


def thinned(config: ModelConfig) -> int:
    """Return how many numbers, of a token in a layer, adapters read of which some are left out."""
    if config.adapter is UNSET or not config.adapter.dropout:
        return 0
    return sum(matrix.num_in for matrix in adapted(config, 0))


def decoder(config: ModelConfig) -> cost.Decoder:
    """Return what the closed forms need to know of a model."""
    return cost.Decoder(
        num_parameters=num_parameters(config),
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        width=config.width,
        q_width=config.q_width,
        kv_width=config.kv_width,
        ffn_width=config.ffn_width,
        has_qk_norm=config.has_qk_norm,
    )


def device_free_nbytes(device: Device) -> int:
    """Return the bytes torch may still take on a GPU; on Apple's, of the memory it shares with the CPU."""
    if device.torch.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device.torch)
        return int(free)
    return int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory())


def device_taken_nbytes(device: Device) -> int:
    """Return the bytes torch has taken on a GPU, those included that it keeps for later."""
    if device.torch.type == "cuda":
        return int(torch.cuda.memory_reserved(device.torch))
    return int(torch.mps.driver_allocated_memory())


def limit_memory(device: Device, cap_nbytes: int) -> None:
    """Let torch take no more than so much of a GPU: what would exceed it is out of memory. A CPU has no such switch."""
    if device.torch.type == "cuda":
        total = int(torch.cuda.mem_get_info(device.torch)[1])
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_nbytes / total), device.torch)
    elif device.torch.type == "mps":
        torch.mps.set_per_process_memory_fraction(min(1.0, cap_nbytes / int(torch.mps.recommended_max_memory())))


# What allocators say: CUDA, MPS, cuBLAS, and the CPU's on Linux, macOS and Windows.
_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether `error` is an allocator's way of saying that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


@contextmanager
def allocating(what: str, device: Device) -> Iterator[None]:
    """Turn an allocator's error into one that says what did not fit.

    Raises:
        OutOfMemory: memory ran out inside.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"{what} does not fit on {device.name}: {first_line(error)}. Close other programs, set has_recompute = "
            "true or a half precision, or join from a larger machine."
        ) from error


def first_line(error: BaseException) -> str:
    """Return the beginning of what torch says, which goes on for pages."""
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:300]
