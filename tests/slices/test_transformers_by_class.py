"""Every class of Transformers that predicts words is right in slices, or refused by name: a list of some, and an eighth of all.

`--write-transformers --tier every` runs all.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import bpipe
from bpipe.errors import ConfigurationError, StageError
from bpipe.slices import sliced_transformer
from bpipe.slices.hugging_face import in_slices as unproven
from tests.partition.sweep.classes import class_of, groups, small, transformers
from tests.partition.sweep.outcome import REFUSED, RIGHT, WRONG, Outcome
from tests.partition.sweep.table import IN_SLICES, PATH, slices_section
from tests.slices.sweep import causal_names, in_slices

NUM_PROCESSES, LIMIT_S = 2, 3000
TAKEN = ["GPTNeoXForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM"]
QUICK = [
    "Gemma3ForCausalLM",
    "DiffLlamaForCausalLM",
    "JetMoeForCausalLM",
    "MiniCPM3ForCausalLM",
    "FalconForCausalLM",
]
OTHER_KEYS = "its attention attends to other keys and values than it has handed to its cache"
REFUSALS = {
    "DiffLlamaForCausalLM": OTHER_KEYS,
    "DistilBertForMaskedLM": "looks ahead",
    "DogeForCausalLM": "gives no gradient to its mask",
    "FalconForCausalLM": "a small model of its kind raises",
    "GteForMaskedLM": "looks ahead",
    "JetMoeForCausalLM": OTHER_KEYS,
    "JinaEmbeddingsV3ForMaskedLM": "looks ahead",
    "LayoutLMForMaskedLM": OTHER_KEYS,
    "MiniCPM3ForCausalLM": OTHER_KEYS,
    "MobileBertForMaskedLM": "looks ahead",
    "MptForCausalLM": "a small model of its kind raises",
    "NomicBertForMaskedLM": "looks ahead",
    "PhimoeForCausalLM": "it draws random numbers besides dropout",
}


def test_a_fixed_list() -> None:
    found = in_slices(QUICK)
    assert [one for one in found if not is_as_listed(one)] == []


def is_as_listed(one: Outcome) -> bool:
    return one.kind == RIGHT if one.name in TAKEN else one.kind == REFUSED and REFUSALS[one.name] in one.why


@pytest.mark.timeout(LIMIT_S)
def test_classes(request: pytest.FixtureRequest) -> None:
    """Their table is in docs/transformers.md."""
    are_all = request.config.getoption("--write-transformers")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = [one for group in pool.map(in_slices, groups(causal_names(), are_all=are_all)) for one in group]
    assert [one for one in found if one.kind == WRONG] == []
    assert [one for one in found if one.name in (*TAKEN, *REFUSALS) and not is_as_listed(one)] == []
    assert sum(one.kind == RIGHT for one in found) > (80 if are_all else 4)
    before, _, section = PATH.read_text().partition(IN_SLICES)
    if are_all:
        PATH.write_text(before + slices_section(found))
    elif f"transformers {transformers.__version__} " in before:
        assert [one for one in found if (f"`{one.name}`" in taken_of(section)) != (one.kind == RIGHT)] == []


def taken_of(section: str) -> str:
    return section.partition("### Take slices")[2].partition("### Take no slices")[0]


def test_the_page_is_of_what_is_taken() -> None:
    """As far as the fixed list goes."""
    taken, _, refused = PATH.read_text().partition(IN_SLICES)[2].partition("### Take no slices")
    assert [name for name in TAKEN if f"`{name}`" not in taken] == []
    assert [name for name in REFUSALS if f"`{name}`" not in refused] == []


def test_a_layer_that_transforms_its_values_after_the_cache() -> None:
    """Before, what earlier slices have handed over was not what a whole sequence attends to, and gradients were wrong."""
    module = unproven(small(class_of("DiffLlamaForCausalLM")).train())
    with pytest.raises(StageError, match=f"DiffLlamaForCausalLM cannot take slices: .*{OTHER_KEYS[14:]}"):
        module(torch.ones(1, 4, dtype=torch.long))


class Twice(torch.nn.Module):
    """A layer that attends twice, as some do to halves of their heads."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.inner(*args, **kwargs)
        return self.inner(*args, **kwargs)


def test_a_layer_that_attends_twice() -> None:
    model: Any = small(class_of("LlamaForCausalLM"))
    model.model.layers[0].self_attn = Twice(model.model.layers[0].self_attn)
    with pytest.raises(StageError, match="its layer 0 hands over keys and values twice"):
        unproven(model)(torch.ones(1, 4, dtype=torch.long))


def test_what_cannot_be_proven_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = class_of("LlamaForCausalLM")
    part = bpipe.split_transformer(small(cls), 1)[0]
    monkeypatch.setattr(cls, "__init__", None)
    with pytest.raises(ConfigurationError, match=r"cannot be proven, because no small model of its kind can be built.*prove=False"):
        sliced_transformer(part)
    assert sliced_transformer(part, prove=False) is not None


def test_what_is_wrong_without_a_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here earlier slices are forgotten."""
    part = bpipe.split_transformer(small(class_of("LlamaForCausalLM")), 1)[0]
    monkeypatch.setattr("bpipe.slices.transformers_cache.causal_attention", lambda q, k, v, _, **options: _alone(q, k, v))
    with pytest.raises(ConfigurationError, match=r"LlamaForCausalLM cannot take slices: .* the outputs of slices are not those"):
        sliced_transformer(part)


def _alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
