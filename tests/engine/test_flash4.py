"""When FlashAttention 4 replaces PyTorch's flash kernel."""

from types import SimpleNamespace

import pytest
import torch

from flatout.engine.ops import flash4

GPU = torch.device("cuda")


@pytest.fixture
def active(monkeypatch):
    """The activated kernels, on a Hopper GPU on which the package is installed."""
    names = [None]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash4, "has_flash4", lambda: True)
    monkeypatch.setattr(flash4, "current_flash_attention_impl", lambda: names[-1])
    monkeypatch.setattr(flash4, "activate_flash_attention_impl", names.append)
    restored = lambda **_: names.append(None)  # noqa: E731
    monkeypatch.setattr(flash4, "restore_flash_attention_impl", restored)
    return names


def config(**given):
    return SimpleNamespace(attention_dropout=0.0, **given)


def test_long_rows_take_it_and_the_next_model_gives_it_back(active):
    flash4.choose_flash_kernel(config(), GPU, 1200)
    flash4.choose_flash_kernel(config(sliding_window=64), GPU, 1200)
    assert active == [None, "FA4"]
    flash4.choose_flash_kernel(SimpleNamespace(attn_pdrop=0.1), GPU, 1200)
    assert active == [None, "FA4", None]


@pytest.mark.parametrize(
    ("given", "longest", "device"),
    [
        (config(), 512, GPU),
        (config(sliding_window=4096), 1200, GPU),
        (config(sliding_window=128), 1200, GPU),
        (SimpleNamespace(attention_probs_dropout_prob=0.1), 1200, GPU),
        (config(), 1200, torch.device("cpu")),
    ],
)
def test_pytorchs_own_kernel_serves_otherwise(active, given, longest, device):
    flash4.choose_flash_kernel(given, device, longest)
    assert active == [None]


def test_it_is_not_asked_for_the_same_bits_again(active, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    flash4.choose_flash_kernel(config(), GPU, 1200)
    assert active == [None]


def test_a_broken_package_is_told_of(active, monkeypatch, caplog):
    def broken(name):
        raise AttributeError("no such kernel")

    monkeypatch.setattr(flash4, "activate_flash_attention_impl", broken)
    flash4.choose_flash_kernel(config(), GPU, 1200)
    assert (
        "FlashAttention 4 is unavailable (no such kernel): using PyTorch" in caplog.text
    )


@pytest.mark.parametrize(
    ("installed", "fits"),
    [
        (None, False),
        ("4.0.0b4", True),
        ("4.0.0b18", True),
        ("4.0.0b18+cu13", True),
        ("4.0.0b19.dev2", False),
        ("4.0.0b19", False),
        ("4.0.0b36", False),
        ("4.0.0", False),
    ],
)
def test_versions_that_pytorch_cannot_call_are_told_of_once(
    installed, fits, tmp_path, monkeypatch, caplog
):
    """From 4.0.0b19 on, the forward function returns more than two values."""
    if installed:
        install(tmp_path, installed)
    monkeypatch.syspath_prepend(tmp_path)
    flash4.has_flash4.cache_clear()
    assert [flash4.has_flash4(), flash4.has_flash4()] == [fits, fits]
    flash4.has_flash4.cache_clear()
    if fits or not installed:
        assert not caplog.messages
        return
    (said,) = caplog.messages
    for part in (torch.__version__, f"flash-attn-4 {installed}", "==4.0.0b18"):
        assert part in said


def install(folder, version):
    """Create the metadata and the import package of flash-attn-4."""
    metadata = folder / f"flash_attn_4-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Name: flash-attn-4\nVersion: {version}\n")
    (folder / "flash_attn" / "cute").mkdir(parents=True)
