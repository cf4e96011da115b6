"""Every class of the installed Transformers is cut right or refused at the split: 30 of them here, and all in `make test-all`."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("transformers")

from tests.partition.sweep.classes import class_names, class_of, groups, takes_hidden_states, transformers
from tests.partition.sweep.outcome import NOT_BUILT, REFUSED, RIGHT, WRONG, Outcome, outcomes
from tests.partition.sweep.table import PATH, page

NUM_PROCESSES = 2
LIMIT_S = 3000

CUT = [
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BloomForCausalLM",
    "CohereForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "ModernBertForMaskedLM",
    "Olmo2ForCausalLM",
    "PhiForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "RobertaForMaskedLM",
    "StableLmForCausalLM",
]
REFUSALS = {
    "BertForQuestionAnswering": "its head returns other things than logits",
    "CTRLLMHeadModel": "output 0 differs by up to",
    "DebertaV2ForMaskedLM": "would raise",
    "LlamaForSequenceClassification": "output 0 differs by up to",  # it looks for the padding in input_ids
    "LongformerForMaskedLM": "would raise",
    "MPNetForMaskedLM": "would raise",
    "NanoChatForCausalLM": "output 0 differs by up to",
    "RoFormerForMaskedLM": "would raise",
    "T5EncoderModel": "output 0 differs by up to",
    "XLNetLMHeadModel": "a parameter of the model itself",
}


@pytest.mark.slow
def test_a_fixed_list() -> None:
    found = {one.name: one for one in outcomes([*CUT, *REFUSALS])}
    assert [one for one in found.values() if one.kind != (RIGHT if one.name in CUT else REFUSED)] == []
    assert [found[name] for name, why in REFUSALS.items() if why not in found[name].why] == []


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S)
def test_every_class(request: pytest.FixtureRequest) -> None:
    """Its table is in docs/transformers.md, of the version that it names."""
    known = {name: cls for name in class_names() if (cls := class_of(name)) is not None}
    names = [name for name, cls in known.items() if takes_hidden_states(cls)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context) as pool:
        found = [one for group in pool.map(outcomes, groups(names)) for one in group]
    assert [one for one in found if one.kind == WRONG] == []
    assert len(found) == len(names) > 500 and sum(one.kind == NOT_BUILT for one in found) < 0.1 * len(found)
    text = page(found, len(known) - len(names), transformers.__version__)
    if request.config.getoption("--write-transformers"):
        PATH.write_text(text)
    if f"transformers {transformers.__version__} " in PATH.read_text():
        assert PATH.read_text() == text


def test_the_page_is_of_what_is_cut() -> None:
    """As far as the fixed list goes."""
    right, _, refused = PATH.read_text().partition("## Refused")
    assert [name for name in CUT if f"`{name}`" not in right] == []
    assert [name for name in REFUSALS if f"`{name}`" not in refused] == []


def test_a_page() -> None:
    found = [Outcome("B", RIGHT), Outcome("A", RIGHT), Outcome("C", REFUSED, "why"), Outcome("D", NOT_BUILT, "no")]
    text = page(found, 5, "9.9")
    assert "`A`, `B`" in text and "| why | `C` |" in text and "| no | `D` |" in text
    assert "2 classes are right, 1 are refused" in text
