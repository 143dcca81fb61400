from __future__ import annotations

import pytest

from trainckpt.encryption import keys
from trainckpt.errors import ConfigurationError


@pytest.fixture
def identity(tmp_path):
    found = keys.generate()
    keys.write_identity(tmp_path / "id", found)
    return found


def test_an_identity_is_read_back_from_a_file_that_only_its_user_can_read(identity, tmp_path):
    assert keys.read_identities(tmp_path / "id") == (identity,)
    assert (tmp_path / "id").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_there_is_never_written_over(identity, tmp_path):
    with pytest.raises(ConfigurationError, match="is there already"):
        keys.write_identity(tmp_path / "id", keys.generate())
    assert keys.read_identities(tmp_path / "id") == (identity,)


def test_what_is_printed_of_an_identity_does_not_hold_its_secret(identity):
    secret = keys.to_text(keys.IDENTITY, identity.secret)
    assert identity.recipient in repr(identity)
    assert repr(identity.secret) not in repr(identity)
    assert secret not in repr(identity)


def test_any_letter_that_is_mistyped_is_found(identity):
    text = identity.recipient
    for at in range(len(keys.RECIPIENT), len(text)):
        wrong = "b" if text[at] == "a" else "a"
        with pytest.raises(ConfigurationError, match="is no trainckpt-recipient"):
            keys.public_bytes(text[:at] + wrong + text[at + 1 :])


@pytest.mark.parametrize("text", ["", "a", "trainckpt-recipient-", "trainckpt-recipient-é0", "-x"])
def test_what_is_no_recipient_is_refused(text):
    with pytest.raises(ConfigurationError):
        keys.public_bytes(text)


def test_a_broken_identity_is_refused_without_being_shown(identity, tmp_path):
    secret = keys.to_text(keys.IDENTITY, identity.secret)
    (tmp_path / "broken").write_text(f"{secret[:-1]}\n")
    with pytest.raises(ConfigurationError) as caught:
        keys.read_identities(tmp_path / "broken")
    assert secret[25:40] not in f"{caught.value}"
    assert "keygen" in caught.value.hint


def test_recipients_come_as_text_or_from_files_and_each_counts_once(identity, tmp_path):
    other = keys.generate().recipient
    (tmp_path / "team").write_text(f"# the team\n{other}\n{identity.recipient}\n\n")
    words = [identity.recipient, str(tmp_path / "team")]
    assert keys.parse_recipients(words) == (identity.recipient, other)


@pytest.mark.parametrize(("content", "why"), [("", "holds no recipient"), (None, "cannot read")])
def test_a_file_without_recipients_is_refused(tmp_path, content, why):
    if content is not None:
        (tmp_path / "file").write_text(content)
    with pytest.raises(ConfigurationError, match=why):
        keys.parse_recipients([str(tmp_path / "file")])


def test_an_identity_is_not_taken_for_a_recipient(identity, tmp_path):
    """Else somebody hands his secret to the trainer."""
    with pytest.raises(ConfigurationError, match="holds no recipient"):
        keys.parse_recipients([str(tmp_path / "id")])
