"""Settings from the environment and their errors, which name the setting."""

from __future__ import annotations

import pytest

from triptych.shared.errors import BadRequest
from triptych.shared.settings import Settings, load_settings


def test_flags_win_over_the_environment_which_wins_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_MAX_IMAGES", "3")
    monkeypatch.setenv("TRIPTYCH_BLOCK_SIZE", "8")
    settings = load_settings(max_images=5, block_size=None)
    assert (settings.max_images, settings.block_size, settings.max_messages) == (5, 8, 512)
    assert settings.model_fields_set == {"max_images", "block_size"}


def test_an_unknown_variable_is_named_with_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_MAX_IMAGE", "3")
    with pytest.raises(BadRequest, match=r"TRIPTYCH_MAX_IMAGE \(did you mean TRIPTYCH_MAX_IMAGES\?\); allowed: .*_MODEL_NAME"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "65536"),
        ("PORT", "x"),
        ("BLOCK_SIZE", "0"),
        ("DTYPE", "int4"),
        ("LOG_JSON", "maybe"),
        ("REQUEST_TIMEOUT_S", "0"),
        ("GROUP", "pictures"),
    ],
)
def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TRIPTYCH_{name}", value)
    with pytest.raises(BadRequest, match=f"TRIPTYCH_{name}='{value}'") as caught:
        load_settings()
    assert "https://" not in caught.value.message


def test_a_bad_flag_is_named() -> None:
    with pytest.raises(BadRequest, match="TRIPTYCH_PORT=-1"):
        load_settings(port=-1)


def test_every_setting_has_a_default() -> None:
    assert not [name for name, info in Settings.model_fields.items() if info.is_required()]
