"""The guards see what they are there to see."""

from __future__ import annotations

import ast
import json
from collections import Counter

import pytest

from tests.guards.__main__ import compare
from tests.guards.record import leaves, leaves_of_file
from tests.guards.same_ast import differences, stripped

BEFORE = '''"""Old words."""
import json

def told(wish):
    """Of one."""
    return wish.held + 1
'''


def compared(after):
    renames = Counter()
    found = differences(stripped(BEFORE)[0], stripped(after)[0], renames)
    return list(found), dict(renames)


def test_other_words_in_docstrings_are_no_difference():
    assert compared(BEFORE.replace("Of one.", "Return one.")) == ([], {})


def test_a_rename_is_counted_and_is_no_difference():
    found, renames = compared(BEFORE.replace("wish", "request").replace("told", "status"))
    assert found == []
    assert renames == {("told", "status"): 1, ("wish", "request"): 2}


@pytest.mark.parametrize(("old", "new"), [("+ 1", "+ 2"), ("+ 1", "- 1"), ("(wish)", "(wish, *_)")])
def test_other_code_is_a_difference(old, new):
    found, _ = compared(BEFORE.replace(old, new))
    assert found


def test_json_inside_json_is_taken_apart():
    assert dict(leaves("file", {"a": json.dumps({"b": [1, None]})})) == {
        "file/a/b/0": "1",
        "file/a/b/1": "null",
    }


def test_a_changed_byte_of_a_shard_is_a_difference(tmp_path):
    header = json.dumps({"__metadata__": {"rank": "0"}}).encode()
    recorded = []
    for data in (b"same", b"sane"):
        file = tmp_path / "rank00000.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + data)
        recorded.append(dict(leaves_of_file("shard", file)))
    assert recorded[0].keys() == recorded[1].keys()
    assert {key for key in recorded[0] if recorded[0][key] != recorded[1][key]} == {"shard/bytes"}


def test_what_chance_decides_is_not_compared(tmp_path, capsys):
    files = []
    for name, leaf in (("before", "1"), ("after", "2")):
        recording = {"leaves": {"run/pid": leaf, "run/created": leaf}, "chance": ["run/pid"]}
        files.append(tmp_path / name)
        files[-1].write_text(json.dumps({"one rank": recording}))
    assert compare(*files) == 0
    recording = json.loads(files[1].read_text())
    recording["one rank"]["leaves"]["run/exit code"] = "75"
    files[1].write_text(json.dumps(recording))
    assert compare(*files) == 1
    assert "run/exit code" in capsys.readouterr().out


def test_imports_are_compared_as_a_set():
    tree, names = stripped("from a import b, c\nimport d as e\nx = b\n")
    assert names == {"b", "c", "e"}
    assert len(tree.body) == 1
    assert isinstance(tree.body[0], ast.Assign)
