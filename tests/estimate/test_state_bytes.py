"""Bytes a parameter."""

from __future__ import annotations

import pytest

from bpipe.errors import ConfigurationError
from bpipe.estimate.state_bytes import DEFAULT_BYTES_PER_PARAMETER, bytes_per_parameter


def test_published() -> None:
    """ZeRO (arXiv 1910.02054, section 3.1): 16 with 16-bit gradients. Megatron-LM: 18, or 6 + 12/d with a distributed optimizer."""
    assert bytes_per_parameter() == DEFAULT_BYTES_PER_PARAMETER == 18
    assert bytes_per_parameter(gradient_precision="bf16") == 16
    assert [bytes_per_parameter(num_shards=d) for d in (1, 2, 4, 8)] == [6 + 12 / d for d in (1, 2, 4, 8)]


def test_others() -> None:
    assert bytes_per_parameter(precision="fp32") == 4 + 4 + 8
    assert bytes_per_parameter("SGD", precision="fp32") == 8
    assert bytes_per_parameter("momentum") == 2 + 4 + 4 + 4


def test_unknown() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'adam"):
        bytes_per_parameter("addam")
    with pytest.raises(ConfigurationError, match="num_shards=0"):
        bytes_per_parameter(num_shards=0)
