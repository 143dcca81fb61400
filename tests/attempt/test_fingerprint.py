"""What decides bits besides the state, as recorded and compared; GPUs by a stand-in for torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.end_to_end.training import Parts
from trainckpt import Checkpointer
from trainckpt.attempt import fingerprint
from trainckpt.attempt.fingerprint import (
    differences,
    fp32_precision,
    gpu_facts,
    not_deterministic,
    take_fingerprint,
)

H100 = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132)
A100 = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, multi_processor_count=108)
PINNED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
CUDA_0, CUDA_1, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


def lib(*, visible=(H100,), backends="cpu:gloo,cuda:nccl", warn_only=False, **cudnn):
    """As much of torch as is asked, with deterministic settings unless the test says otherwise."""
    precise = SimpleNamespace(fp32_precision="ieee")
    matmul = SimpleNamespace(
        fp32_precision="none",
        allow_fp16_reduced_precision_reduction=True,
        allow_bf16_reduced_precision_reduction=True,
    )
    cuda = SimpleNamespace(
        matmul=matmul,
        flash_sdp_enabled=lambda: True,
        mem_efficient_sdp_enabled=lambda: False,
        math_sdp_enabled=lambda: True,
        cudnn_sdp_enabled=lambda: False,
        preferred_blas_library=lambda: SimpleNamespace(name="Cublas"),
    )
    settings = {"enabled": True, "benchmark": False, "deterministic": False, **cudnn}
    return SimpleNamespace(
        version=SimpleNamespace(cuda="13.0", hip=None),
        backends=SimpleNamespace(
            cuda=cuda,
            cudnn=SimpleNamespace(version=lambda: 91002, conv=precise, rnn=precise, **settings),
        ),
        cuda=SimpleNamespace(
            get_device_properties=lambda device: visible[device.index],
            nccl=SimpleNamespace(version=lambda: (2, 27, 3)),
        ),
        distributed=SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: backends is not None,
            get_backend_config=lambda: backends,
        ),
        is_deterministic_algorithms_warn_only_enabled=lambda: warn_only,
    )


@pytest.fixture
def driver(tmp_path):
    file = tmp_path / "version"
    file.write_text("580.65.06\n")
    return file


def recorded(driver, *, world=1, algorithms=True, environment=PINNED, device=H100, **torch_):
    facts = take_fingerprint(world, [CPU], [fingerprint.describe([CUDA_0], lib(visible=[device]))])
    facts["deterministic algorithms"] = algorithms
    return facts | gpu_facts(world, lib(**torch_), environment, driver)


# ---- what is recorded


@pytest.fixture
def _as_it_was():
    modules = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [module.fp32_precision for module in modules]
    yield
    for module, precision in zip(modules, before, strict=True):
        module.fp32_precision = precision


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9 lacks the setting"
)
@pytest.mark.usefixtures("_as_it_was")
def test_a_run_with_torchs_new_tf32_setting_begins_and_records_it(tmp_path):
    before = take_fingerprint(1)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with Checkpointer(tmp_path, **Parts().tracked()) as ckpt:
        next(iter(ckpt.batches()))
    assert compare(before, take_fingerprint(1)) == [], "of no CPU's concern"
    assert fp32_precision(torch.backends.cuda.matmul) == "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    name = "torch.backends.mkldnn.matmul.fp32_precision"
    assert compare(before, take_fingerprint(1)) == [f"{name} was 'ieee', is 'tf32'"]


def test_what_decides_bits_on_a_gpu_is_recorded(driver):
    facts = gpu_facts(4, lib(), {**PINNED, "NCCL_DEBUG": "INFO"}, driver)
    assert facts == {
        "cuda": "13.0",
        "driver": "580.65.06",
        "cudnn": 91002,
        "torch.backends.cudnn.enabled": True,
        "torch.backends.cudnn.deterministic": False,
        "cudnn benchmark": False,
        "deterministic algorithms only warn": False,
        "cublas workspace": ":4096:8",
        "CUBLASLT_WORKSPACE_SIZE": None,
        "NVIDIA_TF32_OVERRIDE": None,
        "torch.backends.cuda.matmul.fp32_precision": "ieee",
        "torch.backends.cudnn.conv.fp32_precision": "ieee",
        "torch.backends.cudnn.rnn.fp32_precision": "ieee",
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": True,
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": True,
        "attention backends": ["flash", "math"],
        "blas library": "Cublas",
        "nccl version": "2.27.3",
        "nccl variables": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"},
    }
    assert gpu_facts(1, lib(), {}, driver.with_name("none"))["driver"] is None
    for alone in (gpu_facts(1, lib(), {}), gpu_facts(2, lib(backends="cpu:gloo,cuda:gloo"), {})):
        assert "nccl variables" not in alone


def test_the_settings_of_the_torch_that_is_installed_are_read():
    facts = gpu_facts(1)
    assert facts["torch.backends.cudnn.enabled"] is torch.backends.cudnn.enabled
    assert set(facts["attention backends"]) <= {"flash", "mem_efficient", "math", "cudnn"}
    assert facts["torch.backends.cuda.matmul.fp32_precision"] in ("ieee", "tf32")


def test_an_older_torch_is_asked_in_its_own_words():
    assert fp32_precision(SimpleNamespace(allow_tf32=True)) == "tf32"
    assert fp32_precision(SimpleNamespace(allow_tf32=False)) == "ieee"


def test_the_devices_that_train_are_named_not_those_that_can_be_seen():
    fake = lib(visible=[A100, H100])
    found = fingerprint.describe([CUDA_1], fake)
    assert found == "NVIDIA H100, capability 9.0, 132 SMs"
    only = lib(visible=[H100])
    assert fingerprint.describe([CUDA_0], only) == found
    assert fingerprint.training_devices([CPU, CUDA_1]) == [CUDA_1]
    assert fingerprint.training_devices([CPU]) == [CPU]
    assert fingerprint.training_devices([]) == [CPU]
    assert take_fingerprint(2, [CPU], [found, "cpu"])["device"] == [found, "cpu"]
    assert take_fingerprint(2, [CPU], [found, found])["device"] == found


# ---- what is compared


def compare(then, now):
    """The differences of two fingerprints, in words."""
    return [part.reason for part in differences(then, now)]


def test_another_gpu_driver_or_setting_is_named(driver):
    then = recorded(driver)
    assert compare(then, recorded(driver)) == []
    h100, a100 = "NVIDIA H100, capability 9.0, 132 SMs", "NVIDIA A100, capability 8.0, 108 SMs"
    driver.write_text("590.1")
    now = recorded(driver, device=A100, deterministic=True)
    assert compare(then, now) == [
        f"device was '{h100}', is '{a100}'",
        "driver was '580.65.06', is '590.1'",
        "torch.backends.cudnn.deterministic was False, is True",
    ]


def test_a_run_that_moves_between_gpu_and_cpu_says_so_and_no_more(driver):
    on_gpu, on_cpu = recorded(driver), take_fingerprint(1)
    on_cpu["deterministic algorithms"] = True
    device = "NVIDIA H100, capability 9.0, 132 SMs"
    assert compare(on_gpu, on_cpu) == [f"device was '{device}', is 'cpu'"]
    assert compare(on_cpu, on_gpu) == [f"device was 'cpu', is '{device}'"]


def older(now, **gpu):
    """The same, as it was recorded before `device` was."""
    words = (
        "python",
        "torch",
        "machine",
        "cpu capability",
        "threads",
        "deterministic algorithms",
        "default dtype",
        "world",
        "hash seed",
        "numpy",
    )
    return {**{word: now[word] for word in words}, "matmul precision": "highest", **gpu}


def test_a_snapshot_of_an_older_release_is_not_called_inexact_for_what_it_lacks(driver):
    on_cpu, on_gpu = take_fingerprint(1), recorded(driver)
    gpus = {"cuda": "13.0", "cudnn benchmark": False, "cublas workspace": ":4096:8", "nccl": {}}
    assert compare(older(on_cpu), on_cpu) == []
    assert compare(older(on_cpu, devices=["NVIDIA H100"], **gpus), on_cpu) == []
    seen = ["NVIDIA A100", "NVIDIA H100"]
    assert compare(older(on_gpu, devices=seen, **gpus), on_gpu) == []


def test_what_a_snapshot_of_an_older_release_did_record_is_compared(driver):
    on_cpu, on_gpu = take_fingerprint(1), recorded(driver)
    device = "NVIDIA H100, capability 9.0, 132 SMs"
    assert compare(older(on_gpu), on_gpu) == [f"device was 'cpu', is '{device}'"]
    others = {"devices": ["NVIDIA A100"], "cudnn benchmark": True}
    assert compare(older(on_gpu, **others), on_gpu) == [
        "cudnn benchmark was True, is False",
        f"device was 'cpu or NVIDIA A100', is '{device}'",
    ]
    rough = {**older(on_cpu), "matmul precision": "medium"}
    name = "torch.backends.mkldnn.matmul.fp32_precision"
    assert compare(rough, on_cpu) == [f"{name} was 'bf16', is 'ieee'"]


# ---- settings that do not repeat themselves


def test_a_run_whose_settings_repeat_themselves_has_nothing_to_change(driver):
    assert not_deterministic(recorded(driver, world=8)) == []
    assert not_deterministic(take_fingerprint(8)) == [], "on the CPU"
    few = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    assert not_deterministic(recorded(driver, world=2, environment=few)) == [], "a + b is b + a"


def test_each_setting_that_does_not_repeat_itself_is_said_with_the_line_to_change(driver):
    loose = recorded(driver, world=3, algorithms=False, environment={}, benchmark=True)
    assert [reason.partition("; ")[2] for reason in not_deterministic(loose)] == [
        "call torch.use_deterministic_algorithms(True)",
        "set torch.backends.cudnn.benchmark = False",
        "launch with CUBLAS_WORKSPACE_CONFIG=:4096:8",
        "launch with NCCL_ALGO=Ring NCCL_PROTO=Simple",
    ]
    warned = not_deterministic(recorded(driver, warn_only=True))
    assert len(warned) == 1
    assert warned[0].endswith("call torch.use_deterministic_algorithms(True) without warn_only")
