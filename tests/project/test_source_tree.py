"""The tree can be read: few modules in a folder, and a file that is long says why it is one."""

from __future__ import annotations

import ast
from pathlib import Path

import ostinato

ROOT = Path(ostinato.__file__).parent
MOST_MODULES = 12  # in a folder, besides what makes it a package or a command
MOST_LINES = 400
MOST_FAMILY_LINES = 60  # of what a new family of models takes, in one file

# Folders with more modules, and why.
WIDE = {
    ".": "the names that users import, and the few modules that every package stands on; all else "
    "is in folders",
}
# Longer files, and why each is one.
LONG = {
    "attention/triton/decode_attention.py": "one kernel, two thirds of the file, and its "
    "launch: Triton compiles a kernel from one function, whose phases share their registers",
    "compat.py": "one table of every private name of torch, Triton and transformers, with what "
    "each is for and what happens without it: it is read from end to end when one is upgraded",
    "llm.py": "half of it is help(LLM), where users read",
    "runner/model_runner.py": "a step must not pass through another file, and ranks override the "
    "rest, which is thin methods over capture/, sleep/ and steps/",
}


def test_a_folder_can_be_seen_at_a_glance() -> None:
    modules: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            folder = path.parent.relative_to(ROOT).as_posix()
            modules.setdefault(folder, set()).add(path.name)
    wide = {folder: len(names) for folder, names in modules.items() if len(names) > MOST_MODULES}
    unlisted, stale = wide.keys() - WIDE.keys(), WIDE.keys() - wide.keys()
    assert not unlisted, f"{wide}: put what belongs together into a folder of its own"
    assert not stale, f"{stale}: take them off the list"


def test_a_long_file_has_a_reason() -> None:
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in ROOT.rglob("*.py")
    }
    long = {name: count for name, count in lines.items() if count > MOST_LINES}
    unlisted, stale = long.keys() - LONG.keys(), LONG.keys() - long.keys()
    assert not unlisted, f"{long}: split them into concepts, or say above why each is one"
    assert not stale, f"{stale}: take them off the list"


def test_tests_are_where_their_subject_is() -> None:
    """``tests/gpu`` needs a GPU, ``tests/project`` is about the repository."""
    tests = Path(__file__).parents[1]
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    elsewhere = {folder for folder in folders if folder.parts[:1] not in (("gpu",), ("project",))}
    missing = sorted(str(folder) for folder in elsewhere if not (ROOT / folder).is_dir())
    assert not missing, f"src/ostinato has no {missing}; move these tests to what they test"


def test_a_family_is_a_short_table() -> None:
    source = (ROOT / "models/native/config/families.py").read_text(encoding="utf-8")
    (families,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    )
    lines = {
        ast.literal_eval(name): (table.end_lineno or 0) - name.lineno + 1
        for name, table in zip(families.keys, families.values, strict=True)
        if name is not None
    }
    assert len(lines) > 20
    assert not {name: count for name, count in lines.items() if count > MOST_FAMILY_LINES}
