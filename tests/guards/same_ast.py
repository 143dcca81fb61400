"""Show that two versions of the source differ in names, comments and docstrings alone.

    python -m tests.guards same-code COMMIT [--moves FILE] [--names FILE]

Each module is parsed in both versions, docstrings are dropped, imports are compared as a set, and
the two trees are walked side by side. Where identifiers differ the pair is counted as a rename;
any other difference is printed. `--moves` has one `old.module new.module` a line. With `--names`
(`old new` a line) a rename that is not listed there counts as a difference.
"""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
IDENTIFIERS = {"id", "attr", "arg", "name", "asname", "rest", "names"}


def differences(old: ast.AST, new: ast.AST, renames: Counter[tuple[str, str]]) -> Iterator[str]:
    """Yield how two trees differ, and count the identifiers that were renamed."""
    if type(old) is not type(new):
        yield f"line {line(new)}: {type(old).__name__} became {type(new).__name__}"
        return
    for field in old._fields:
        before, after = getattr(old, field, None), getattr(new, field, None)
        if isinstance(before, ast.AST) and isinstance(after, ast.AST):
            yield from differences(before, after, renames)
        elif isinstance(before, list) and isinstance(after, list):
            if len(before) != len(after):
                yield f"line {line(new)}: {len(before)} parts became {len(after)} ({field})"
                continue
            for one, other in zip(before, after, strict=True):
                if isinstance(one, ast.AST):
                    yield from differences(one, other, renames)
                elif one != other:
                    renames[one, other] += 1
        elif before != after:
            if field in IDENTIFIERS and isinstance(before, str) and isinstance(after, str):
                renames[before, after] += 1
            else:
                yield f"line {line(new)}: {before!r} became {after!r}"


def line(node: ast.AST) -> str:
    """Return the node's line for a message."""
    return str(getattr(node, "lineno", "?"))


def stripped(text: str) -> tuple[ast.Module, set[str]]:
    """Return a module without docstrings and imports, and the names that it imports."""
    tree, imported = ast.parse(text), set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        kept = []
        for number, statement in enumerate(body):
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                imported.update(alias.asname or alias.name for alias in statement.names)
            elif not (number == 0 and is_text(statement)):
                kept.append(statement)
        node.body = kept
    return tree, imported


def is_text(statement: ast.stmt) -> bool:
    """Return True for a docstring."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def pairs(file: Path | None) -> dict[str, str]:
    """Return the pairs of words that a file lists, one a line."""
    lines = file.read_text().splitlines() if file else []
    return dict(words.split()[:2] for words in lines if len(words.split()) > 1)


def same_code(commit: str, moves: Path | None, names: Path | None) -> int:
    """Compare src at `commit` with src here; print renames and differences; 1 if any is left."""
    moved, allowed = pairs(moves), pairs(names)
    listed = git("ls-tree", "-r", "--name-only", commit, "src/trainckpt").splitlines()
    renames: Counter[tuple[str, str]] = Counter()
    found = []
    for path in (path for path in listed if path.endswith(".py")):
        module = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
        here = ROOT / "src" / (moved.get(module, module).replace(".", "/") + ".py")
        if not here.exists():
            found.append(f"{path}: not here any more")
            continue
        before, imported = stripped(git("show", f"{commit}:{path}"))
        after, imports = stripped(here.read_text())
        if len(imported) != len(imports):
            only = ", ".join(sorted(imported ^ imports))
            found.append(f"{path}: {len(imported)} imports became {len(imports)} ({only})")
        found += [f"{path}: {text}" for text in differences(before, after, renames)]
    unlisted = {pair for pair in renames if names and allowed.get(pair[0]) != pair[1]}
    for pair, count in renames.most_common():
        print(f"{'NOT LISTED ' if pair in unlisted else ''}{pair[0]} -> {pair[1]}: {count}")
    print("\n".join(found) or "no other difference")
    return int(bool(found or unlisted))


def git(*arguments: str) -> str:
    """Return what git prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout
