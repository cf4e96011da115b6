"""From which width messages hide: the formula against the counts of a stage, and what the command says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bpipe.__main__ import main
from bpipe.errors import ConfigurationError
from bpipe.estimate import Execution, Transformer
from bpipe.estimate.square_cube import IN_8_BITS, hides_from
from bpipe.estimate.stages import layer_costs
from bpipe.tools.quantities import bytes_per_second_of

GPT = Transformer(num_layers=24, hidden=1024, num_heads=4, sequence=512, vocabulary=50257)
LLAMA = replace(GPT, ffn=3072, is_gated=True, has_biases=False)


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("execution", [Execution(), Execution(tensor_parallel=4), Execution(precision="fp32")])
def test_a_message_takes_as_long_as_a_forward_there(model: Transformer, execution: Execution) -> None:
    """From that width on, and not below it: with the operations and bytes of a stage in the middle."""
    rates = {"flops_per_s": 1e14, "bytes_per_s": 2.5e8}
    width = hides_from(model, execution, layers=6, **rates)
    for hidden, hides in ((width - width % -4, True), (width - width % 4 - 32, False)):
        one = replace(model, hidden=hidden, ffn=round(hidden * model.ffn_hidden / model.hidden))
        layer = layer_costs(one, execution, 2, flops_per_s=rates["flops_per_s"], bytes_per_parameter=18)[1]
        assert (layer.output_bytes / rates["bytes_per_s"] <= 6 * layer.forward_s * (1 + 1e-3)) is hides


def test_8_bits_halve_what_the_width_needs() -> None:
    """B F / (R n) - 4 s is in proportion to the width: 1.0625 bytes in place of 2."""
    how = {"layers": 6, "flops_per_s": 1e14, "bytes_per_s": 2.5e7}
    wide, small = (hides_from(GPT, Execution(), **how, element_bytes=size) for size in (2, IN_8_BITS))
    assert (small * 24 + 4 * 512) / (wide * 24 + 4 * 512) == pytest.approx(1.0625 / 2, rel=1e-3)
    assert hides_from(GPT, Execution(), layers=6, flops_per_s=1e14, bytes_per_s=1e12) == 1


def test_bits_per_second() -> None:
    assert bytes_per_second_of("200Mbit/s") == 25e6
    assert bytes_per_second_of("1 Gbit") == bytes_per_second_of("125MB/s")
    with pytest.raises(ConfigurationError, match="200Mbit/s"):
        bytes_per_second_of("7 parsec")


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["advise", "gpt3-13b", "--device", "v100-32gb", "--stages", "8", "--batch", "64", "--microbatch-sizes", "4"]
    main([*command, "--link", "200Mbit/s"])
    said = " ".join(capsys.readouterr().out.split())
    assert "A message between 8 stages of 5 layers takes no longer than a forward from hidden size" in said
    main(command)
    assert "A message between" not in capsys.readouterr().out
