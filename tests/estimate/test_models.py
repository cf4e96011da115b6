"""Models by name have the parameters that their names say."""

from __future__ import annotations

import re

import pytest

from bpipe.errors import ConfigurationError
from bpipe.estimate import model_named
from bpipe.estimate.models import model_names

PUBLISHED = {"gpt2": 124e6, "llama-7b": 6.7e9, "llama-65b": 65.2e9, "llama2-7b": 6.7e9, "llama3-8b": 8.0e9}  # where it is finer


@pytest.mark.parametrize("name", model_names())
def test_parameters(name: str) -> None:
    """Tolerance 2%: names are rounded (llama2-70b has 69.0e9), and GPT-3's vocabulary is padded."""
    size = re.search(r"(\d+)b$", name)
    published = PUBLISHED.get(name, 1e9 * float(size[1]) if size else None)
    assert published is not None
    assert model_named(name).num_parameters == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama2-7b", 6738415616), ("llama2-70b", 68976648192), ("llama3-8b", 8030261248), ("llama3-70b", 70553706496)],
)
def test_parameters_to_the_last_one(name: str, parameters: int) -> None:
    """What the published checkpoints hold: the sizes of their safetensors indices over 2 bytes."""
    assert model_named(name).num_parameters == parameters


def test_gpt3_96b_is_the_one_of_facts() -> None:
    model = model_named("GPT-3 96B")
    assert (model.num_layers, model.hidden, model.num_heads, model.sequence, model.vocabulary) == (80, 9984, 104, 2048, 51200)


def test_unknown_model() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'llama-65b'"):
        model_named("lama 65b")
