"""Hundreds of broken checkpoints, each made from a small healthy one by one change.

``cases`` yields them by name. A change is a function of a copy's directory.
test_broken_checkpoints.py says what must happen to them.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from tokenizers import Tokenizer, models, pre_tokenizers

Change = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]

VOCAB_SIZE = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)
_DEEP = 100_000
_BIG = 10**400  # no float; its digits are within what Python parses

# Other fields to try.
_UNUSED = ("summary_", "attn_pdrop", "embd_pdrop", "transformers_version", "initializer_", "scale_")

# Values to put in place of any config field.
_NONSENSE: dict[str, str] = {
    "null": "null",
    "negative": "-1",
    "zero": "0",
    "three": "3",
    "many": "100000",
    "huge": "1000000000",
    "64 bits": str(2**64),
    "400 digits": str(_BIG),
    "5000 digits": "9" * 5000,
    "fraction": "1.5",
    "tiny": "1e-300",
    "large": "1e300",
    "nan": "NaN",
    "infinity": "Infinity",
    "-infinity": "-Infinity",
    "text": '"x"',
    "long text": json.dumps("long\n" * 2000),
    "list": "[]",
    "list of text": '["x", null]',
    "object": '{"a": {"b": []}}',
    "true": "true",
    "false": "false",
    "deep": "[" * _DEEP + "]" * _DEEP,
}


def save_bases(directory: Path) -> dict[str, Path]:
    """Healthy checkpoints: for the native decoder, in one file and in shards, and for others."""
    configs = {
        "llama": transformers.LlamaConfig(**_SIZES),
        "qwen2": transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True),
        "gpt2": transformers.GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "mixtral": transformers.MixtralConfig(
            **_SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=8
        ),
    }
    bases = {name: save_tiny(config, directory / name) for name, config in configs.items()}
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for path in bases.values():
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
        tokenizer.save_pretrained(path)
    return bases


def cases(bases: dict[str, Path]) -> Iterator[tuple[str, str, Change]]:
    """Name, base, and change of every broken checkpoint."""
    for base, path in bases.items():
        share = 1.0 if base in ("llama", "gpt2") else 0.25
        every = [
            *_config_cases(path, share),
            *_tensor_cases(path),
            *(_header_cases(path) if base in ("llama", "gpt2") else ()),
            *(_index_cases(path) if base in ("llama", "gpt2") else ()),
            *_file_cases_of_weights(),
            *(_other_files() if base == "llama" else ()),
        ]
        for name, change in every:
            yield f"{base}: {name}", base, change


# --- text files ----------------------------------------------------------------------------------


def _set(file: str, field: str, text: str) -> Change:
    """Put the raw JSON ``text`` in place of a field."""

    def change(path: Path) -> None:
        fields = json.loads((path / file).read_text())
        *outer, last = field.split("/")
        owner = fields
        for name in outer:
            owner = owner[name]
        owner[last] = "@@"
        (path / file).write_text(json.dumps(fields).replace('"@@"', text))

    return change


def _write(file: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda path: (path / file).write_bytes(data)


def _config_cases(path: Path, share: float) -> Iterator[tuple[str, Change]]:
    fields = json.loads((path / "config.json").read_text())
    rope = [f"rope_parameters/{name}" for name in fields.get("rope_parameters") or ()]
    extra = ["layer_types", "quantization_config", "sliding_window", "rope_scaling", "head_dim"]
    extra += ["num_labels", "transformers_weights", "is_encoder_decoder", "torch_dtype"]
    extra += ["n_inner", "rope_theta", "auto_map", "text_config", "partial_rotary_factor"]
    draw = random.Random(0)
    for field in dict.fromkeys([*fields, *rope, *extra]):
        if field.startswith(_UNUSED):
            continue
        for kind, text in _NONSENSE.items():
            if draw.random() < share * 0.2 or (kind == "huge" and share == 1.0):
                yield f"config {field} is {kind}", _set("config.json", field, text)
        if field in fields:
            yield f"config without {field}", _without("config.json", field)


def _without(file: str, field: str) -> Change:
    def change(path: Path) -> None:
        fields = json.loads((path / file).read_text())
        del fields[field]
        (path / file).write_text(json.dumps(fields))

    return change


def _other_files() -> Iterator[tuple[str, Change]]:
    for file in _FILES:
        yield from _file_cases(file)
    for number, (kind, text) in enumerate(_NONSENSE.items()):
        yield f"eos_token_id is {kind}", _set("generation_config.json", "eos_token_id", text)
        yield f"unk_token is {kind}", _set("tokenizer_config.json", "unk_token", text)
        yield f"vocab is {kind}", _set("tokenizer.json", "model/vocab", text)
        if number % 3 == 0:
            yield f"temperature is {kind}", _set("generation_config.json", "temperature", text)
            yield f"class is {kind}", _set("tokenizer_config.json", "tokenizer_class", text)
            yield f"added_tokens is {kind}", _set("tokenizer.json", "added_tokens", text)
            yield f"normalizer is {kind}", _set("tokenizer.json", "normalizer", text)
    yield "eos ids are text", _set("generation_config.json", "eos_token_id", '[2, "3"]')
    yield "eos id is not in the vocabulary", _set("generation_config.json", "eos_token_id", "99999")
    token = '[{"id": 4294967295, "content": "far", "special": true}]'
    yield "added token far away", _set("tokenizer.json", "added_tokens", token)
    doubles = '{"type": "Replace", "pattern": {"String": "w"}, "content": "ww"}'
    steps = ", ".join([doubles] * 40)
    for part in ("normalizer", "decoder"):
        bomb = f'{{"type": "Sequence", "{part}s": [{steps}]}}'
        yield f"{part} without end", _set("tokenizer.json", part, bomb)
    yield "large template", _write("chat_template.jinja", "x" * (5 * 2**20))
    yield "special tokens map", _write("special_tokens_map.json", '{"eos_token": [[[1]]]}')
    yield "adapter", _write("adapter_config.json", '{"base_model_name_or_path": "/etc"}')
    yield "adapter of nothing", _write("adapter_config.json", "[")


def _file_cases_of_weights() -> Iterator[tuple[str, Change]]:
    odd = {
        "a directory": Path.mkdir,
        "a pipe": os.mkfifo,
        "a link to itself": lambda target: target.symlink_to(target),
        "a link to a device": lambda target: target.symlink_to("/dev/zero"),
        "a link to nothing": lambda target: target.symlink_to("nothing"),
    }
    for kind, make in odd.items():
        yield f"weights are {kind}", _instead("model.safetensors", make)
    yield "weights are missing", _instead("model.safetensors", lambda target: None)
    yield "weights are a pickle", _instead("pytorch_model.bin", Path.touch, "model.safetensors")


def _instead(file: str, make: Callable[[Path], object], removed: str | None = None) -> Change:
    """Create ``file`` again, without the existing one or another."""

    def change(path: Path) -> None:
        (path / (removed or file)).unlink(missing_ok=True)
        make(path / file)

    return change


def _file_cases(file: str) -> Iterator[tuple[str, Change]]:
    contents: dict[str, str | bytes] = {
        "empty": "",
        "zeros": bytes(1000),
        "no text": b"\xff\xfe\x00{",
        "null": "null",
        "number": "3",
        "list": "[]",
        "empty object": "{}",
        "text": '"text"',
        "cut": '{"model_type": "llama", "hidd',
        "deep list": "[" * _DEEP,
        "deep object": '{"a":' * _DEEP + "1" + "}" * _DEEP,
        "long integer": '{"a": ' + "9" * 5000 + "}",
        "large": b'{"a": "' + b"a" * (5 * 2**20) + b'"}',
    }
    for name, content in contents.items():
        yield f"{file} is {name}", _write(file, content)

    yield f"{file} is a directory", _instead(file, Path.mkdir)
    yield f"{file} is a pipe", _instead(file, os.mkfifo)
    yield f"{file} is a link to itself", _instead(file, lambda target: target.symlink_to(target))
    if file != "model.safetensors.index.json":
        yield f"{file} is missing", _instead(file, lambda target: None)


# --- tensors -------------------------------------------------------------------------------------


def _edit(change: Callable[[Tensors], object]) -> Change:
    def apply(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def _tensor_cases(path: Path) -> Iterator[tuple[str, Change]]:
    tensors = load_file(path / "model.safetensors")
    for number, (name, tensor) in enumerate(tensors.items()):
        if ".1." in name and number % 3:  # like those of the first layer
            continue
        changed: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "int8": lambda t: t.to(torch.int8),
            "a row less": lambda t: t[:-1].contiguous(),
            "empty": lambda t: t[:0].contiguous(),
            "nan": lambda t: t.index_fill(0, torch.tensor([1]), float("nan")),
        }
        if number % 3 == 0:
            changed |= {
                "bfloat16": lambda t: t.to(torch.bfloat16),
                "float64": lambda t: t.double(),
                "infinite": lambda t: t.index_fill(0, torch.tensor([1]), float("-inf")),
                "beyond float32": lambda t: torch.full_like(t, 1e300, dtype=torch.float64),
                "one dimension more": lambda t: t[None].contiguous(),
                "float8": lambda t: t.to(torch.float8_e4m3fn),
            }
        if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
            changed["transposed"] = lambda t: t.T.contiguous()
        for kind, make in changed.items():
            yield (
                f"{name} is {kind}",
                _edit(lambda t, name=name, make=make: t.update({name: make(t[name])})),
            )
        yield f"no {name}", _edit(lambda t, name=name: t.pop(name))
        renamed = name.replace(".0.", ".7.").replace("weight", "weigth")
        yield (
            f"{name} under another name",
            _edit(lambda t, name=name, renamed=renamed: t.update({renamed: t.pop(name)})),
        )
    yield "no tensors", _edit(lambda t: t.clear())
    for extra in ("more", "lm_head.bias", "model.layers.2.mlp.up_proj.weight", "a\n" * 500, ""):
        yield (
            f"one more: {extra[:40]!r}",
            _edit(lambda t, extra=extra: t.update({extra: torch.ones(3)})),
        )


# --- the header of a safetensors file ------------------------------------------------------------


def _header_cases(path: Path) -> Iterator[tuple[str, Change]]:
    data = (path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    first, second = names[0], names[1]

    def whole(text: str, stated: int | None = None, tail: bytes = body) -> Change:
        start = struct.pack("<Q", len(text.encode()) if stated is None else stated)
        return _write("model.safetensors", start + text.encode() + tail)

    def info(name: str, **fields: Any) -> Change:
        return whole(json.dumps(header | {name: header[name] | fields}))

    text = json.dumps(header)
    yield "header of no length", whole(text, 0)
    for stated in (1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1):
        yield f"header length {stated}", whole(text, stated)
    for cut in (0, 1, 7, 8, 9, 8 + length // 2, 8 + length, len(data) - 1):
        yield f"file of {cut} bytes", _write("model.safetensors", data[:cut])
    yield "one byte more", _write("model.safetensors", data + b"x")
    yield "header is no JSON", whole("x" * 50)
    yield "header is a list", whole("[]")
    yield "header is empty", whole("{}", tail=b"")
    yield "deep header", whole('{"a":' * 50_000)
    begin, end = header[first]["data_offsets"]
    yield "offsets overlap", info(second, data_offsets=header[first]["data_offsets"])
    yield "offsets backwards", info(first, data_offsets=[end, begin])
    yield "offsets beyond the end", info(first, data_offsets=[begin, 2**40])
    yield "negative offsets", info(first, data_offsets=[-4, end])
    yield "offsets of text", info(first, data_offsets=["0", "4"])
    yield "offsets too few", info(first, data_offsets=[0])
    yield "no offsets", info(first, data_offsets=None)
    yield "unknown dtype", info(first, dtype="Q7")
    yield "dtype is a number", info(first, dtype=3)
    yield "another dtype of the same size", info(first, dtype="I32")
    yield "dtype of half the size", info(first, dtype="F16")
    yield "huge shape", info(first, shape=[2**62, 2**62])
    yield "shape of nothing", info(first, shape=[0, 2**62])
    yield "negative shape", info(first, shape=[-1, 4])
    yield "shape of text", info(first, shape="x")
    yield "deep shape", whole(text.replace('"shape": [', '"shape": [' + "[" * 5000, 1))
    twice = text[:-1] + f", {json.dumps(first)}: {json.dumps(header[second])}}}"
    yield "a name twice", whole(twice)
    yield "metadata of numbers", whole(json.dumps(header | {"__metadata__": {"format": 3}}))


# --- index files ---------------------------------------------------------------------------------


def _index_cases(path: Path) -> Iterator[tuple[str, Change]]:
    names = list(load_file(path / "model.safetensors"))

    def indexed(change: Callable[[dict[str, Any]], object] = lambda index: None) -> Change:
        """Two shards and an index of them, which is changed."""

        def apply(path: Path) -> None:
            tensors = load_file(path / "model.safetensors")
            (path / "model.safetensors").unlink()
            index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
            for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
                save_file({name: tensors[name] for name in part}, path / file)
                index["weight_map"] |= dict.fromkeys(part, file)
            change(index)
            (path / "model.safetensors.index.json").write_text(json.dumps(index))

        return apply

    def place(file: Any, number: int = 0) -> Change:
        return indexed(lambda index: index["weight_map"].update({names[number]: file}))

    yield "healthy index", indexed()
    for file in ("b.safetensors", "c.safetensors", "/etc/passwd", "../llama/model.safetensors"):
        yield f"index places a tensor in {file}", place(file)
    for file in ("", ".", "..", "a\0b", "x" * 5000, "a.safetensors/", "config.json", "/dev/zero"):
        yield f"index places a tensor in {file[:20]!r}", place(file)
    for odd in (None, 3, 1.5, True, [], ["a.safetensors"], {"a": "b"}):
        yield f"index places a tensor in {odd}", place(odd)
        yield f"weight_map is {odd}", indexed(lambda index, odd=odd: index.update(weight_map=odd))
    yield "no weight_map", indexed(lambda index: index.pop("weight_map"))
    yield "empty weight_map", indexed(lambda index: index["weight_map"].clear())
    yield "index without a tensor", indexed(lambda index: index["weight_map"].pop(names[0]))
    yield "index with one more", indexed(lambda i: i["weight_map"].update(more="a.safetensors"))
    yield "index metadata is text", indexed(lambda index: index.update(metadata="x"))
    yield (
        "index of a whole file too",
        lambda path: (path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
        ),
    )
