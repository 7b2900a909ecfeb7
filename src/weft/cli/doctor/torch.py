"""What `weft doctor` says of torch: whether its build fits the graphics card, and which models fit into memory."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from weft.cli.doctor.finding import Finding

_SEQ_LEN = 1024  # tokens; of a vocabulary as large models have it
_VOCAB_SIZE = 32_000
_ASK_TIMEOUT_S = 10.0


def check_torch() -> Iterator[Finding]:
    """Yield what is found of torch and the GPU."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", "block", f"torch cannot be loaded: {error}", "run: pip install --force-reinstall torch")
        return
    build = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    card = _nvidia_card()
    if torch.cuda.is_available():
        yield from _check_cuda(build)
    elif torch.backends.mps.is_available():
        yield Finding("torch", "ok", f"{build}, on the Apple GPU")
    elif card is not None:
        yield _unused_card(build, card)
    else:
        yield Finding("torch", "ok", f"{build}; no GPU, trains on the CPU")
    yield _largest_model()


def _check_cuda(build: str) -> Iterator[Finding]:
    import torch

    compiled = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        free, total = torch.cuda.mem_get_info(number)
        text = f"{build}: cuda:{number} is {name}, {free / 1e9:.0f} GB free of {total / 1e9:.0f} GB"
        # Code for a lower minor version runs on a higher one of the same major version.
        fits = any(arch == f"sm_{major}{m}" for arch in compiled for m in range(minor + 1))
        if fits or any(arch.startswith("compute_") for arch in compiled):
            yield Finding("gpu", "ok", text)
        else:
            wanted = f"this build has no code for sm_{major}{minor} (only {', '.join(compiled)})"
            yield Finding("gpu", "note", f"{text}; {wanted}", f"{_reinstall()}, or train with --device cpu")


def _unused_card(build: str, card: str) -> Finding:
    import torch

    if torch.version.cuda is None:
        return Finding("gpu", "note", f"{card} is not used: {build} is a build for CPUs", _reinstall())
    text = f"{card} is not used: {build} is built for CUDA {torch.version.cuda}, which the driver does not run"
    return Finding("gpu", "note", text, f"update the NVIDIA driver to one for CUDA {torch.version.cuda} or newer")


def _reinstall() -> str:
    """Return how to get a torch that uses an NVIDIA card."""
    if sys.platform == "linux":  # the default build there has CUDA
        return "run: pip install --force-reinstall --no-cache-dir torch"
    return 'run the pip command that "Get Started" on the PyTorch site gives for this platform and CUDA'


def _nvidia_card() -> str | None:
    """Return the name of an NVIDIA card that the driver sees, whatever torch thinks."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        try:
            answer = subprocess.run(
                [program, "--query-gpu=name", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=_ASK_TIMEOUT_S,
                check=True,
            )
            return answer.stdout.strip().splitlines()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            pass
    return "an NVIDIA card" if Path("/proc/driver/nvidia/version").exists() else None


def _largest_model() -> Finding:
    """Return which named sizes this machine can train, one sample of 1024 tokens at a time."""
    from weft.codec.build import build as build_codec
    from weft.codec.config import Int8Config
    from weft.cost import training as cost
    from weft.model.config import SIZES, named, num_parameters
    from weft.run.host import host_free_nbytes
    from weft.run.machine import PeerConfig
    from weft.training.device import choose, decoder, device_free_nbytes

    device = choose(PeerConfig())
    free = host_free_nbytes() if device.is_cpu else device_free_nbytes(device)
    codec, held = build_codec(Int8Config()), []
    for size in SIZES:
        config = named(size, _VOCAB_SIZE, _SEQ_LEN)
        num = num_parameters(config)
        memory = cost.peer_memory(
            num,
            cost.part_size(num, 4),
            4,
            codec,
            codec,
            sends_delta=True,
            num_momenta=1,
            activations=cost.activation_nbytes(decoder(config), 1, _SEQ_LEN),
        )
        if memory.peak_nbytes <= 0.9 * free:
            held.append(size)
    what = f"trains models up to {held[-1]}" if held else "no named model fits"
    return Finding("models", "ok" if held else "note", f"{what} ({free / 1e9:.1f} GB free on {device.name})")
