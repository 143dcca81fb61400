"""What an integration relies on is looked at before it is used, and refused in one sentence."""

from __future__ import annotations

import pytest

from trainckpt.errors import ConfigurationError
from trainckpt.integrations.adapter import Relied, check, require


def test_a_framework_that_is_not_installed_is_an_error_with_the_line_that_installs_it():
    with pytest.raises(ConfigurationError, match="needs the package not_there") as caught:
        require("not_there.inner", "lightning")
    assert caught.value.hint == "pip install 'trainckpt[lightning]'"


def test_a_framework_whose_own_import_fails_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import not_there_either\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_there_either"):
        require("half_there", "lightning")


def test_everything_that_is_gone_is_named_in_one_sentence():
    relied = [
        Relied("torch.utils.data:DataLoader", "__iter__", "gives the batches"),
        Relied("torch.utils.data:DataLoader", "_moved", "held the place"),
        Relied("torch.utils.not_there:Class", "name", "held the rest"),
    ]
    with pytest.raises(ConfigurationError, match=r"lacks .*_moved, which held the place; .*rest"):
        check("torch", relied)
    check("torch", relied[:1])
