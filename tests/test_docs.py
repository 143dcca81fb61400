"""The documents say what the code does: their tables, examples, commands and links are checked."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

import trainckpt
from trainckpt import errors
from trainckpt.attempt.options import TABLE, read_options
from trainckpt.cli.main import VERBS, build_parser
from trainckpt.format import json_io, names
from trainckpt.format import manifest as manifests

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FORMAT = (ROOT / "docs/format.md").read_text(encoding="utf-8")

# Stops the script from inside, at a known place: after the second step of the run.
STOP_AFTER_TWO_STEPS = """
import os, runpy, signal, time
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = 0

def stop(*_):
    global steps
    steps += 1
    if steps == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)  # the watcher hears of it while this micro-batch is trained

register_optimizer_step_post_hook(stop)
runpy.run_path("train.py", run_name="__main__")
"""


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def rows(document: str) -> list[list[str]]:
    """The cells of every table row of a document."""
    text = (ROOT / document).read_text(encoding="utf-8")
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split(" |")] for line in lines]


# ---- the README's example


def test_the_example_of_the_readme_goes_on_as_if_it_had_never_stopped(tmp_path, monkeypatch):
    example = next(block for block in blocks(README, "python") if "Checkpointer(" in block)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder in (straight, stopped):
        folder.mkdir()
        (folder / "train.py").write_text(example)
    (stopped / "stop.py").write_text(STOP_AFTER_TWO_STEPS)

    process = start(stopped, "stop.py")
    monkeypatch.chdir(straight)
    runpy.run_path("train.py")
    assert process.wait(60) == 75
    monkeypatch.chdir(stopped)
    runpy.run_path("train.py")

    snapshots = sorted(path.name for path in (stopped / "runs/first/snapshots").iterdir())
    assert snapshots == ["s24~2.1", "s2~1.1"]
    expected, at_the_end = final_state(straight / "runs/first/snapshots/s24~1.1")
    found, at = final_state(stopped / "runs/first/snapshots/s24~2.1")
    assert at == at_the_end
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def start(folder: Path, script: str) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if "TRAINCKPT" not in name}
    return subprocess.Popen(
        [sys.executable, script],
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stderr=subprocess.DEVNULL,
    )


def final_state(snapshot: Path) -> tuple[dict[str, bytes], dict[str, int]]:
    """Bytes of every tensor, and the cursor. The script does not seed what lies in the values."""
    tensors = load_file(snapshot / "rank00000.safetensors")
    cursor = json.loads((snapshot / "manifest.json").read_text())["cursor"]
    return {n: t.tobytes() for n, t in tensors.items() if n != "values.json"}, cursor


# ---- tables


def test_the_table_of_options_is_the_table_of_the_code():
    found = {
        row[0].strip("`"): ast.literal_eval(row[1].strip("`"))
        for row in rows("docs/options.md")
        if re.fullmatch("`[a-z_]+`", row[0])
    }
    assert found == {name: default for name, (default, _, _) in TABLE.items()}


def test_the_example_file_holds_every_option_with_its_default(tmp_path):
    text = (ROOT / "configs/trainckpt.toml").read_text(encoding="utf-8")
    (tmp_path / "trainckpt.toml").write_text(text)
    found, defaults = read_options({}, {}, tmp_path), read_options({}, {}, tmp_path / "nowhere")
    assert set(found.origins.values()) == {"trainckpt.toml"}
    assert [getattr(found, name) for name in TABLE] == [getattr(defaults, name) for name in TABLE]


def test_every_error_stands_in_the_table_of_exit_codes_with_its_code():
    found = {(int(row[0]), row[1].strip("`")) for row in rows("docs/exit-codes.md") if is_code(row)}
    classes = [
        c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, errors.TrainckptError)
    ]
    assert {(c.exit_code, c.__name__) for c in classes} <= found
    assert {code for code, _ in found} == {c.exit_code for c in classes} | {0, 1, 75, 130}


def test_the_readme_lists_the_same_exit_codes():
    listed = {int(row[0]) for row in rows("README.md") if is_code(row)}
    documented = {int(row[0]) for row in rows("docs/exit-codes.md") if is_code(row)}
    assert listed == documented - {1}


def is_code(row: list[str]) -> bool:
    return row[0].isdecimal()


def test_the_python_reference_has_every_public_name():
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    found = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    assert {f"trainckpt.{name}" for name in trainckpt.__all__} <= found


# ---- commands


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_that_is_shown_exists(document):
    text = document.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    assert set(re.findall(r"(?:`|^\$ )make (?:PYTHON=\S+ )?(\w+)", text, re.MULTILINE)) <= targets
    verbs = re.findall(r"(?:`|^\$ )trainckpt ([a-z]+)\b", text, re.MULTILINE)
    assert set(verbs) <= VERBS.keys()


def test_every_verb_and_each_of_its_options_is_documented():
    text = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    actions = build_parser()._actions
    verbs = next(a for a in actions if isinstance(a, argparse._SubParsersAction)).choices
    for verb, parser in verbs.items():
        assert f"\n## {verb}\n" in text
        usage = re.search(rf"^trainckpt {verb} .*?^```$", text, re.MULTILINE | re.DOTALL)
        words = {word for a in parser._actions for word in a.option_strings}
        options = {word for word in words if "_" not in word}  # torchrun's other spelling
        shown = set(re.findall(r"--[a-z]+[a-z-]*", usage[0])) if usage else set()
        assert shown | {"-h", "--help", "--json"} == options


# ---- the format


def test_the_run_record_of_the_format_document_has_the_digest_it_shows():
    sealed, rest = blocks(FORMAT, "json")[:2]
    assert json_io.verify_digest(json_io.parse(sealed.encode(), "it", max_bytes=1000), "it") == (
        json.loads(rest)
    )
    assert json_io.with_digest(json.loads(rest)) == sealed.strip().encode()


def test_the_manifest_of_the_format_document_is_one():
    (shown,) = blocks(FORMAT, 'json title="manifest.json"')
    manifest = manifests.load(shown.encode(), "it")
    assert str(manifest.name) == "s2m1~1.3"
    assert str(len(manifests.dump(manifest))) in FORMAT
    assert all(str(file.num_bytes) in FORMAT for file in manifest.files)


def test_the_pattern_of_the_format_document_is_that_of_folders():
    assert names._FOLDER.pattern.replace("(?:m", "(m") in FORMAT


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_of_json_or_python_is_readable(document):
    text = document.read_text(encoding="utf-8")
    for block in [*blocks(text, "json"), *blocks(text, 'json title="manifest.json"')]:
        json.loads(block)
    for block in blocks(text, "python"):
        ast.parse(block)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_code_block_opens_as_the_site_reads_it(document):
    fences = re.findall(r"^ *```(.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    assert [f for f in fences if not re.fullmatch(r'(\w+( title="[^"]+")?)?', f)] == []


# ---- links


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        found = document.parent / path if path else document
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), target


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.filterwarnings("ignore")
def test_the_loop_of_fabric_in_the_guide_resumes_bitwise(tmp_path, monkeypatch, capsys, caplog):
    guide = (ROOT / "docs/lightning.md").read_text(encoding="utf-8").partition("## Fabric")[2]
    (example,) = blocks(guide, "python")
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder in (straight, stopped):
        folder.mkdir()
        (folder / "train.py").write_text(example)
    (stopped / "stop.py").write_text(STOP_AFTER_TWO_STEPS)

    process = start(stopped, "stop.py")
    monkeypatch.chdir(straight)
    runpy.run_path("train.py")
    expected = capsys.readouterr().out.split()[-1]
    assert process.wait(120) == 75
    monkeypatch.chdir(stopped)
    caplog.set_level("INFO", "trainckpt")
    runpy.run_path("train.py")
    assert "resumed from s2" in caplog.text
    assert "this resume is bitwise" in caplog.text
    assert capsys.readouterr().out.split()[-1] == expected


def test_every_test_that_holds_a_public_report_exists():
    table = (ROOT / "tests/acceptance/README.md").read_text(encoding="utf-8")
    held = [line.split(" | ")[3] for line in table.splitlines() if re.match(r"\| \d", line)]
    assert len(held) == 34
    files = {path for cell in held for path in re.findall(r"[\w/]+\.py", cell)}
    assert [path for path in sorted(files) if not (ROOT / "tests" / path).is_file()] == []
    code = "\n".join((ROOT / "tests" / path).read_text(encoding="utf-8") for path in files)
    defined = set(re.findall(r"^(?:def|class) (\w+)", code, re.MULTILINE))
    named = {name for cell in held for name in re.findall(r"`(\w+)`", cell)}
    assert sorted(named - defined - {"own_values"}) == []
