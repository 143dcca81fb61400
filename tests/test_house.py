"""Rules of the source tree that no linter of this project checks."""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from pathlib import Path

import trainckpt

SOURCE = Path(trainckpt.__file__).parent
MAX_POSITIONAL = 5
SHARED_CLASS_NAMES = {"TrainckptCallback"}  # of two trainers


def nodes():
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}", node


def test_no_function_takes_over_five_positional_arguments():
    """Name further ones: a call with six bare values cannot be read."""
    found = []
    for place, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            if len([name for name in names if name not in ("self", "cls")]) > MAX_POSITIONAL:
                found.append(f"{place} {node.name}")
    assert found == []


def test_a_class_name_stands_for_one_thing():
    places = defaultdict(list)
    for place, node in nodes():
        if isinstance(node, ast.ClassDef):
            places[node.name].append(place)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice.keys() <= SHARED_CLASS_NAMES, twice


# Names in backticks that are not ours: of torch, of shells, examples of keys and snapshots.
FOREIGN = {
    "HF_TOKEN",
    "call_s3",
    "s1200m3",
    "save_model",
    "scancel",
    "terminationGracePeriodSeconds",
}
DOCSTRING_OR_COMMENT = re.compile(r'"""[\s\S]*?"""|#.*')


def test_docstrings_and_comments_name_what_exists():
    """After a rename the old name often lives on where no tool looks."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    known = set(dir(builtins)) | {path.stem for path in SOURCE.rglob("*")} | FOREIGN
    for text in texts.values():
        known.update(re.findall(r"\w+", DOCSTRING_OR_COMMENT.sub("", text)))
    files = {path.name for path in texts}
    wrong = []
    for path, text in texts.items():
        for prose in DOCSTRING_OR_COMMENT.findall(text):
            names = [name.split(".")[-1] for name in re.findall(r"`([A-Za-z_][\w.]*)`", prose)]
            wrong += [
                f"{path.relative_to(SOURCE)}: `{name}`"
                for name in names
                if name not in known and name != "py" and not name.isdecimal()
            ]
            wrong += [
                f"{path.relative_to(SOURCE)}: {name}"
                for name in re.findall(r"\b[a-z_]+\.py\b", prose)
                if name not in files
            ]
    assert wrong == []


ATTRIBUTES = re.compile(r"Attributes:\n((?:    .*\n?|\n)*)")
ENTRY = re.compile(r"^    (\w[\w, ]*):", re.MULTILINE)


def test_attributes_that_a_docstring_lists_are_those_of_its_class():
    wrong = []
    for place, node in nodes():
        section = ATTRIBUTES.search(
            (isinstance(node, ast.ClassDef) and ast.get_docstring(node)) or ""
        )
        if section is None:
            continue
        known = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
        known |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        known |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        listed = {name.strip() for names in ENTRY.findall(section[1]) for name in names.split(",")}
        wrong += [f"{place} {node.name}: {name}" for name in sorted(listed - known)]
    assert wrong == []
