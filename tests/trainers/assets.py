"""A small text and a tokenizer of bytes, where torchtitan's debug model looks for them; nothing comes from a hub."""

from __future__ import annotations

import json
from pathlib import Path


def write_assets(folder: Path) -> None:
    """Write both under `folder`, torchtitan's working directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, text = (folder / "tests" / "assets" / name for name in ("tokenizer", "c4_test"))
    tokens.mkdir(parents=True)
    text.mkdir()
    tokenizer = Tokenizer(models.BPE({byte: token for token, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tokens / "tokenizer.json"))
    (tokens / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    lines = [f"{n} balls are in {n % 7} boxes, and {n * n} are not. " * 8 for n in range(200)]
    (text / "data.json").write_text("\n".join(json.dumps({"text": line}) for line in lines))
