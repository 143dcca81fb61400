"""Which arguments and variables are secrets: whole words of a name decide, not parts of words."""

from __future__ import annotations

import pytest

from trainckpt.attempt.launch import redact_environment
from trainckpt.storage.redact import one_line, redact_arguments, redact_text


@pytest.mark.parametrize(
    "argv",
    [
        ["--tokenizer", "gpt2"],
        ["--max-tokens=4096"],
        ["--max_tokens", "4096"],
        ["model.num_keys=8"],
        ["train.py", "token"],
    ],
)
def test_what_only_sounds_like_a_secret_is_kept(argv):
    assert redact_arguments(argv) == argv


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["hub.token=s3cr3t"], ["hub.token=<redacted>"]),
        (["--password", "-s3cr3t"], ["--password", "<redacted>"]),
        (["--api-key=s3cr3t"], ["--api-key=<redacted>"]),
        (["--hub.token", "s3cr3t", "x"], ["--hub.token", "<redacted>", "x"]),
    ],
)
def test_a_secret_is_redacted_however_it_is_given(argv, shown):
    assert redact_arguments(argv) == shown


@pytest.mark.parametrize(
    "argv",
    [
        ["--azure=AccountName=a;AccountKey=c2VjcmV0==;EndpointSuffix=core.windows.net"],
        ["--connection-string", "AccountName=a;AccountKey=c2VjcmV0=="],
        ["https://a.blob.core.windows.net/c/k?sv=2024&sig=c2VjcmV0%3D"],
        ["SharedAccessSignature=sv=1&sig=c2VjcmV0%3D"],
    ],
)
def test_what_opens_a_store_leaves_only_its_mark(argv):
    """A command without the mark would be taken for one that can be run again."""
    (*_, shown) = redact_arguments(argv)
    assert "<redacted>" in shown
    assert "c2Vj" not in shown


def test_what_is_only_called_like_a_signature_is_kept():
    argv = [
        "--data=https://h/x?page=2&n=3",
        "--sigma=0.1",
        "--sig=0.5",
        "noise.sig=0.1",
        "--assertion=off",
        "-c",
        "sig = signal.SIGTERM",
    ]
    assert redact_arguments(argv) == argv


def test_variables_follow_the_same_rule():
    given = {"TORCH_HF_TOKEN": "s3cr3t", "TORCH_TOKENIZER": "gpt2", "HF_TOKEN": "s3cr3t"}
    assert redact_environment(given) == {"TORCH_HF_TOKEN": "<redacted>", "TORCH_TOKENIZER": "gpt2"}


def test_a_container_of_azure_is_no_secret():
    """Else the tier's URL would not be stored, and a resume not find it."""
    url = "abfss://container@account.dfs.core.windows.net/run"
    assert redact_text(url) == url
    assert redact_text("abfs://key:s3cr3t@account/run") == "abfs://<redacted>@account/run"


def test_the_token_of_a_hub_is_redacted_as_an_argument():
    assert redact_arguments(["env", "HF_TOKEN=s3cr3t"]) == ["env", "HF_TOKEN=<redacted>"]


def test_a_line_to_show_has_no_secret_no_line_break_and_no_escape():
    text = "\x1b[31mtoken=abcdef\r\nwas \x07refused\x1b[0m by s3://me:pw@host/x"
    shown = one_line(text)
    assert shown == "token=<redacted>  was  refused by s3://<redacted>@host/x"
    assert len(one_line("x" * 9999)) == 500
