"""Every class of the installed Transformers is cut right or refused at the split: a list of 30, and an eighth of all.

`--write-transformers --tier every` runs all.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("transformers")

from tests.partition.sweep.classes import class_names, class_of, groups, takes_hidden_states, transformers
from tests.partition.sweep.outcome import NOT_BUILT, REFUSED, RIGHT, WRONG, Outcome, outcomes
from tests.partition.sweep.table import IN_SLICES, PATH, page

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
    "CTRLLMHeadModel": "outputs differ",
    "LlamaForSequenceClassification": "outputs differ",  # it looks for the padding in input_ids
    "LongformerForMaskedLM": "would raise",
    "MPNetForMaskedLM": "would raise",
    "NanoChatForCausalLM": "outputs differ",
    "RoFormerForMaskedLM": "would raise",
    "T5EncoderModel": "outputs differ",
    "XGLMForCausalLM": "outputs differ",  # it drops out in its forward
    "XLNetLMHeadModel": "a parameter of the model itself",
}


def test_a_fixed_list() -> None:
    found = {one.name: one for one in outcomes([*CUT, *REFUSALS])}
    assert [one for one in found.values() if one.kind != (RIGHT if one.name in CUT else REFUSED)] == []
    assert [found[name] for name, why in REFUSALS.items() if why not in found[name].why] == []


@pytest.mark.timeout(LIMIT_S)
def test_classes(request: pytest.FixtureRequest) -> None:
    """Their table is in docs/transformers.md, of the version that it names."""
    are_all = request.config.getoption("--write-transformers")
    known = {name: cls for name in class_names() if (cls := class_of(name)) is not None}
    names = [name for name, cls in known.items() if takes_hidden_states(cls)]
    assert len(names) > 500
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context) as pool:
        found = [one for group in pool.map(outcomes, groups(names, are_all=are_all)) for one in group]
    assert [one for one in found if one.kind == WRONG] == []
    assert len(found) > (0.99 if are_all else 0.08) * len(names)
    assert sum(one.kind == NOT_BUILT for one in found) < 0.1 * len(found)
    if are_all:
        text = page(found, len(known) - len(names), transformers.__version__)
        PATH.write_text(text + "\n" + "".join(PATH.read_text().partition(IN_SLICES)[1:]))  # which another sweep writes
    if f"transformers {transformers.__version__} " in PATH.read_text():  # what is not built depends on other packages
        listed = right_of(PATH.read_text())
        assert [one for one in found if (f"`{one.name}`" in listed) != (one.kind == RIGHT)] == []


def right_of(text: str) -> str:
    return text.partition("## Right")[2].partition("## Refused")[0]


def test_the_page_is_of_what_is_cut() -> None:
    """As far as the fixed list goes."""
    text = PATH.read_text()
    refused = text.partition("## Refused")[2].partition("## Not built")[0]
    assert [name for name in CUT if f"`{name}`" not in right_of(text)] == []
    assert [name for name in REFUSALS if f"`{name}`" not in refused] == []


def test_a_page() -> None:
    found = [Outcome("B", RIGHT), Outcome("A", RIGHT), Outcome("C", REFUSED, "why"), Outcome("D", NOT_BUILT, "no")]
    text = page(found, 5, "9.9")
    assert "`A`, `B`" in text and "| why | `C` |" in text and "| no | `D` |" in text
    assert "2 classes are right, 1 are refused" in text
