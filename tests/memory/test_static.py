"""What stays on a device, and what is free there."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from bpipe.memory.static import available_bytes, bytes_under, coming_bytes, present_bytes, static_bytes

CPU, META = torch.device("cpu"), torch.device("meta")


class Mixed(nn.Module):
    """A trained matrix and a frozen one, tied, and a buffer, of 16 float32 each."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(4, 4))
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.tied = self.trained
        self.register_buffer("buffer", torch.ones(4, 4))


def test_parameters_buffers_and_gradients() -> None:
    module = Mixed()
    assert (present_bytes([module], CPU), coming_bytes([module], CPU)) == (3 * 64, 64)
    module.trained.sum().backward()
    assert (present_bytes([module], CPU), coming_bytes([module], CPU)) == (4 * 64, 0)
    assert static_bytes([module], CPU) == 4 * 64


def test_what_modules_share_counts_once() -> None:
    module = Mixed()
    assert static_bytes([module, module], CPU) == static_bytes([module], CPU)


def test_only_what_is_on_the_device() -> None:
    module = Mixed()
    module.elsewhere = nn.Parameter(torch.ones(4, 4, device="meta"))
    assert static_bytes([module], CPU) == 4 * 64
    assert static_bytes([module], META) == 2 * 64


def test_a_view_of_something_larger() -> None:
    """As parameters that lie in one flat buffer do: it is there once, and each gradient is as large as its parameter."""
    flat = torch.ones(32)
    module = nn.Module()
    module.first, module.second = nn.Parameter(flat[:24]), nn.Parameter(flat[24:])
    assert (present_bytes([module], CPU), coming_bytes([module], CPU)) == (128, 128)


def test_storages_count_once() -> None:
    tensor = torch.ones(8)
    assert bytes_under([tensor, tensor[2:], tensor.view(2, 4), torch.ones(1)]) == 32 + 4


def test_what_is_free_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free on the device once torch has given back what it keeps for certain streams, less the reserve; never less than nothing."""
    free = [1000]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 9999))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.__setitem__(0, 1300))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    assert available_bytes(torch.device("cuda", 0), 0) == 1300
    assert available_bytes(torch.device("cuda", 0), 300) == 1000
    assert available_bytes(torch.device("cuda", 0), 5000) == 0
