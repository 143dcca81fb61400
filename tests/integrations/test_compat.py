"""What an integration relies on is looked at before it is used, and refused in one sentence."""

from __future__ import annotations

import importlib
import sys

import pytest

from trainckpt.attempt import log
from trainckpt.errors import ConfigurationError
from trainckpt.integrations.compat import check, check_code, require


def test_a_framework_that_is_not_installed_is_an_error_with_the_line_that_installs_it():
    with pytest.raises(ConfigurationError, match="needs the package not_there") as caught:
        require("not_there.inner", "lightning")
    assert caught.value.hint == "pip install 'trainckpt[lightning]'"


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_what_an_integration_refuses_ends_the_script_with_78_before_any_checkpointer(
    monkeypatch, name
):
    monkeypatch.setattr(log, "_installed", [])
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    importlib.reload(importlib.import_module(f"trainckpt.{name}"))
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(ConfigurationError, ConfigurationError("refused", hint="do so"), None)
    assert ended.value.code == 78


def test_a_framework_whose_own_import_fails_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import not_there_either\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_there_either"):
        require("half_there", "lightning")


def test_everything_that_is_gone_is_named_in_one_sentence():
    relied = [
        ("torch.utils.data:DataLoader", "__iter__", "gives the batches"),
        ("torch.utils.data:DataLoader", "_moved", "held the place"),
        ("torch.utils.not_there:Class", "name", "held the rest"),
    ]
    with pytest.raises(ConfigurationError, match=r"lacks .*_moved, which held the place; .*rest"):
        check("torch", relied)
    check("torch", relied[:1])


def test_a_function_that_no_longer_uses_what_is_relied_on_is_refused():
    first, last = "torch.utils.data:DataLoader.__init__", "torch.utils.data:DataLoader._gone"
    check_code("torch", [(first, ("dataset", "batch_size="))])
    with pytest.raises(
        ConfigurationError, match=r"lacks dealer in .*__init__; shuffled in .*"
    ) as no:
        check_code("torch", [(first, ("dataset", "dealer", "shuffled=")), (last, ("dataset",))])
    assert "dataset in torch.utils.data:DataLoader._gone" in str(no.value)
