"""Settings: what is not allowed stops start-up with a sentence that names it."""

import pytest

from vllm_splitzip.errors import SettingError
from vllm_splitzip.settings import Settings


def test_the_defaults_need_no_configuration():
    assert Settings.from_extra_config({}) == Settings()


def test_lmcache_keys_pass_by():
    assert Settings.from_extra_config({"lmcache.remote_url": "fs://localhost:0/x"}) == Settings()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("codecs", "fast"),
        (3, "fast"),
        ("codec", "zip"),
        ("codec", None),
        ("codec", ["fast"]),
        ("chunk_tokens", 0),
        ("chunk_tokens", -256),
        ("chunk_tokens", 256.0),
        ("chunk_tokens", True),
        ("chunk_tokens", "256"),
        ("codebook", ""),
        ("codebook", 3),
        ("verify", 1.5),
        ("verify", -0.1),
        ("verify", True),
        ("verify", float("nan")),
        ("load_timeout_s", 0),
        ("load_timeout_s", float("inf")),
        ("load_timeout_s", "10"),
        ("load_timeout_s", 1e12),
        ("load_timeout_s", 10**400),
        ("max_store_gib", 0),
        ("max_store_gib", 1e-12),
        ("max_store_gib", 1e308),
        ("max_store_gib", float("nan")),
        ("trace_dir", ""),
        ("trace_dir", 1),
    ],
)
def test_a_bad_key_or_value_is_named(key, value):
    with pytest.raises(SettingError) as error:
        Settings.from_extra_config({key: value})
    assert repr(key) in str(error.value)
    assert repr(value) in str(error.value)
    assert "allowed" in str(error.value)


@pytest.mark.parametrize(
    "extra",
    [{"codec": "raw"}, {"codec": "auto"}, {"chunk_tokens": 512}, {"verify": 0}, {"verify": 1}],
)
def test_good_values_are_taken(extra):
    settings = Settings.from_extra_config(extra)
    for key, value in extra.items():
        assert getattr(settings, key) == value
