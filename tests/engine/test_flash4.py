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
    monkeypatch.setattr(flash4, "_is_installed", lambda: True)
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


def test_absent_packages_are_no_fault(monkeypatch):
    monkeypatch.setattr(flash4, "PACKAGE", "no_such_package.cute")
    assert not flash4._is_installed()
