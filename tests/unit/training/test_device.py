"""What this machine computes on, and what is refused before anything is allocated."""

from pathlib import Path

import psutil
import pytest
import torch
from msgspec.structs import replace

from unit.peer.tiny import MODEL, run_config
from weft.codec.build import build
from weft.codec.config import Int8Config
from weft.cost import training as cost
from weft.errors import ConfigError, TooLarge
from weft.model.config import named, num_parameters
from weft.run import host
from weft.run.amend import first_charter
from weft.run.machine import CapsConfig, PeerConfig
from weft.run.trust import AuditedTrust, RecordedTrust
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, FedAvgConfig
from weft.training import device as module
from weft.training.device import (
    Device,
    audits_nbytes,
    check_fits,
    choose,
    decoder,
    evidence_nbytes,
    host_free_nbytes,
    is_out_of_memory,
    limit_memory,
    needed_nbytes,
)
from weft.verify.evidence.operations import program_of
from weft.verify.evidence.program.evaluate import room_nbytes

CPU = Device(torch.device("cpu"), "fp32", "cpu")
GPU = Device(torch.device("cuda", 0), "bf16", "a GPU")
GB = 10**9


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary 100")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_cpu_computes_in_fp32() -> None:
    device = choose(PeerConfig())
    assert (device.torch.type, device.precision, device.autocast_dtype, device.is_cpu) == ("cpu", "fp32", None, True)
    assert "threads" in device.name
    assert choose(PeerConfig(precision="bf16")).autocast_dtype is torch.bfloat16


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(("capability", "precision"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp32")])
def test_a_gpu_computes_in_bf16_if_it_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = choose(PeerConfig())
    assert (device.torch, device.precision) == (torch.device("cuda:0"), precision)
    assert "Imaginary 100" in device.name
    assert choose(PeerConfig(device="cpu")).is_cpu
    assert choose(PeerConfig(precision="fp16")).autocast_dtype is torch.float16


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"peer\.device.*Set|set"):
        choose(PeerConfig(device=name))


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose(PeerConfig(device="cuda:0")).torch.index == 0
    with pytest.raises(ConfigError, match=r'"cuda:1" is not there.*1 CUDA'):
        choose(PeerConfig(device="cuda:1"))


# --- memory ---


def test_closed_forms_know_the_model() -> None:
    config = named("7b", 32_000, 4096)
    found = decoder(config)
    tables = config.vocab_size * config.width * (1 if config.is_tied else 2)
    norms = (2 * config.num_layers + 1) * config.width
    assert config.num_layers * found.layer_matrices + tables + norms == num_parameters(config) == found.num_parameters


def test_a_model_that_no_machine_here_holds_is_refused_with_the_figures() -> None:
    run = run_config(model=named("7b", 32_000, 4096), seq_len=4096)
    if host_free_nbytes() > 300 * GB:
        pytest.skip("this machine holds a 7b model")
    with pytest.raises(
        TooLarge, match=r"7,241,732,096 parameters .* 4096 tokens .*: [23]\d\d\.\d\d GB needed, .* GB free"
    ):
        check_fits(run, PeerConfig(), CPU)


def test_what_a_cpu_needs_is_what_the_closed_form_says(monkeypatch: pytest.MonkeyPatch) -> None:
    run, num = run_config(DiLoCoConfig(), batch_size=32), num_parameters(MODEL)
    activations = cost.activation_nbytes(decoder(MODEL), 8, run.train.seq_len)
    memory = cost.peer_memory(
        num,
        cost.part_size(num, 4),
        4,
        build(Int8Config()),
        build(Int8Config()),
        sends_delta=True,
        num_momenta=1,
        activations=activations,
        num_rounds=-(-run.train.tokens // (run.quota * run.train.seq_len)),
    )
    assert memory.kept < cost.KEPT_NBYTES, "a run of few rounds keeps few results"
    assert needed_nbytes(run, PeerConfig(), CPU, 8) == {"cpu": memory.on_cpu}
    assert memory.on_cpu == memory.peak_nbytes + int(cost.HEAP * activations)
    room = memory.on_cpu + int((1 + cost.HEAP) * activations) * 2 // 8  # for ten
    monkeypatch.setattr(module, "host_free_nbytes", lambda: int(room / 0.9) + 1)
    assert check_fits(run, PeerConfig(), CPU) == 8
    assert check_fits(run, PeerConfig(micro_batch=3), CPU) == 3
    assert check_fits(run, PeerConfig(micro_batch=1000), CPU) == 8
    assert check_fits(run, PeerConfig(has_recompute=True), CPU) > 8


def test_evidence_takes_memory_where_single_steps_are_signed_in_exact_numbers() -> None:
    run = run_config(DiLoCoConfig(), batch_size=8)
    exact = replace(run, trust=AuditedTrust(numerics="exact", micro_batch=2))
    assert evidence_nbytes(exact) == room_nbytes(program_of(first_charter(exact))) > 16 * num_parameters(MODEL)
    whole = replace(run, trust=AuditedTrust(numerics="exact"))
    assert evidence_nbytes(whole) > evidence_nbytes(exact)
    for trust in (AuditedTrust(), RecordedTrust(), AuditedTrust(numerics="exact", trace_every=2)):
        assert evidence_nbytes(replace(run, trust=trust)) == 0
    pulled = run_config(FedAvgConfig(proximal=0.1), batch_size=8)
    assert evidence_nbytes(replace(pulled, trust=AuditedTrust(numerics="exact"))) == 0


def test_audits_take_memory_of_the_host_beside_training(monkeypatch: pytest.MonkeyPatch) -> None:
    run, num = run_config(DiLoCoConfig(), batch_size=8), num_parameters(MODEL)
    audited = replace(run, trust=AuditedTrust())
    shown, looked, lent = 32 * num, (3 * 3 * 12 + 16 + 20) * num, 28 * num
    assert audits_nbytes(audited) == 8 * shown + looked + lent + build(Int8Config()).nbytes(num)
    assert audits_nbytes(run) == audits_nbytes(replace(run, trust=RecordedTrust())) == 0
    for place in (CPU, GPU):
        plain, more = needed_nbytes(run, PeerConfig(), place, 8), needed_nbytes(audited, PeerConfig(), place, 8)
        assert more.keys() == plain.keys()
        assert [more[each] - plain[each] for each in more] == [audits_nbytes(audited)] + [0] * (len(more) - 1)
    monkeypatch.setattr(
        module, "host_free_nbytes", lambda: int(needed_nbytes(run, PeerConfig(), CPU, 8)["cpu"] / 0.9) + 1
    )
    assert check_fits(run, PeerConfig(), CPU) == 8
    with pytest.raises(TooLarge, match=r"0\.01 GB of it for audits"):
        check_fits(audited, PeerConfig(), CPU)


def test_a_gpu_holds_what_trains_and_the_host_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    run, vector = run_config(DiLoCoConfig(), batch_size=32), 4 * num_parameters(MODEL)
    activations = cost.activation_nbytes(decoder(MODEL), 8, run.train.seq_len, is_half=True)
    needed = needed_nbytes(run, PeerConfig(), GPU, 8)
    assert needed["cuda:0"] == 4 * vector + activations
    wide = run_config(DiLoCoConfig(), model=named("tiny", 257, 16))
    held = needed_nbytes(wide, PeerConfig(), GPU, 1)["cuda:0"]
    assert held == 5 * 4 * num_parameters(wide.model)  # evaluation: a second vector, larger than activations
    kept = -(-run.train.tokens // (run.quota * run.train.seq_len)) * build(Int8Config()).nbytes(num_parameters(MODEL))
    assert 2 * vector < needed["cpu"] - kept < 7 * vector
    gradients = needed_nbytes(run_config(DdpConfig(), batch_size=32), PeerConfig(), GPU, 8)
    assert gradients["cuda:0"] == needed["cuda:0"] - 2 * vector  # the moments are replicated, and with the outer step
    monkeypatch.setattr(module, "device_free_nbytes", lambda device: GB)
    assert check_fits(run, PeerConfig(), GPU) == 32  # all of the batch: a GPU says when it is full
    monkeypatch.setattr(module, "device_free_nbytes", lambda device: vector)
    with pytest.raises(TooLarge, match=r"cuda:0: 0\.00 GB needed, 0\.00 GB free"):
        check_fits(run, PeerConfig(), GPU)


def test_a_cap_on_memory_leaves_what_the_process_has_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    run, num = run_config(DiLoCoConfig(), batch_size=32), num_parameters(MODEL)
    one, eight = (needed_nbytes(run, PeerConfig(), CPU, size)["cpu"] for size in (1, 8))
    taken = 100 * GB
    monkeypatch.setattr(module, "host_free_nbytes", lambda: 300 * GB)
    monkeypatch.setattr(module, "process_nbytes", lambda: taken)

    def capped(room: int) -> PeerConfig:
        return PeerConfig(caps=CapsConfig(memory_nbytes=taken + int(room / 0.9) + 1))

    assert check_fits(run, PeerConfig(), CPU) == 32
    assert check_fits(run, capped(eight), CPU) == 8
    assert check_fits(run, capped(one), CPU) == 1
    with pytest.raises(TooLarge, match=f"{num:,} parameters .* Raise --memory or --vram"):
        check_fits(run, capped(one // 2), CPU)


def test_a_cap_on_vram_leaves_what_torch_has_not_taken_and_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run, vector = run_config(DiLoCoConfig(), batch_size=32), 4 * num_parameters(MODEL)
    told: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(module, "device_free_nbytes", lambda device: 40 * GB)
    monkeypatch.setattr(module, "device_taken_nbytes", lambda device: GB)
    assert check_fits(run, PeerConfig(caps=CapsConfig(vram_nbytes=2 * GB)), GPU) == 32
    with pytest.raises(TooLarge, match="cuda:0"):
        check_fits(run, PeerConfig(caps=CapsConfig(vram_nbytes=GB + vector)), GPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GB, 40 * GB))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: told.append((share, device))
    )
    limit_memory(GPU, 10 * GB)
    limit_memory(GPU, 80 * GB)
    limit_memory(CPU, GB)
    assert told == [(0.25, GPU.torch), (1.0, GPU.torch)]


def test_a_containers_limit_counts_not_its_hosts_memory(tmp_path: Path) -> None:
    free = host._container_free_nbytes
    assert free(tmp_path) == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500\n")
    assert free(tmp_path) == []
    (tmp_path / "memory.max").write_text("10000\n")
    assert free(tmp_path) == [10_000 - 3000 + 500]
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("8000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("2000\n")
    (tmp_path / "memory" / "memory.stat").write_text("cache 10\n")
    assert free(tmp_path) == [7500, 6000]
    assert 0 < host_free_nbytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=str,
)
def test_the_words_of_allocators_are_understood(error: BaseException) -> None:
    assert is_out_of_memory(error)


def test_what_torch_says_here_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes cannot be multiplied"), ValueError("out of memory")], ids=str)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)
