"""What the README says can be run, set or looked up, can be."""

import json
import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from vllm_splitzip.codec.modes import MODES
from vllm_splitzip.commands.main import COMMANDS as SUBCOMMANDS
from vllm_splitzip.plugin import NAME
from vllm_splitzip.settings import AUTO, Settings
from vllm_splitzip.storage.quiet import quiet_lmcache

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXTRAS = {"cpu", "cuda"}


def load_config(extra):
    with quiet_lmcache():
        from vllm_splitzip.storage.config import load_config
    return load_config(extra, max_object_bytes=1 << 20)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def inline():
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S))


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]
MAKES = [text for text in [*COMMANDS, *inline()] if text.startswith("make ")]


def test_first_commands_are_demo_and_test():
    assert COMMANDS[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("command", sorted(set(MAKES)))
def test_make_command(command):
    run = subprocess.run(
        [*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_serve_line_names_the_connector():
    [line] = [line for line in COMMANDS if line.startswith("vllm serve")]
    config = json.loads(shlex.split(line)[-1])
    assert config == {"kv_connector": NAME, "kv_role": "kv_both"}


def test_extras_exist():
    assert set(re.findall(r"\[(cpu|cuda)\]", README)) == EXTRAS
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in pyproject for extra in EXTRAS)


def test_every_subcommand_is_there():
    assert set(re.findall(r"`vllm-splitzip (\w+)", README)) == set(SUBCOMMANDS)


def test_every_codec_is_named():
    [row] = re.findall(r"^\| `codec` \| `[^`]+` \|(.*)$", README, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == {*MODES, AUTO}


def test_option_table_is_the_settings():
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", README, re.MULTILINE)
    assert {key: json.loads(value) for key, value in rows} == {
        field.name: field.default for field in fields(Settings)
    }


def test_store_example_is_accepted(tmp_path, monkeypatch):
    [example] = blocks("yaml")
    path = tmp_path / "lmcache.yaml"
    path.write_text(example.replace("/var/cache", str(tmp_path)))
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    config = load_config({})
    assert config.disk
    assert [remote.scheme for remote in config.remotes] == ["redis"]


SCHEMES = set(re.findall(r"\b(\w+)://", README)) - {"https"}


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_store_scheme(scheme):
    extra = {"lmcache.remote_url": f"{scheme}://h:1/x"}
    if scheme == "s3":
        extra["lmcache.extra_config"] = {"s3_region": "us-east-1"}
    assert load_config(extra).remotes


PATHS = {text for text in inline() if re.fullmatch(r"[\w.][\w./-]*/[\w./-]*", text)}


@pytest.mark.parametrize("path", sorted(PATHS - {"build/demo.json"}))
def test_path_exists(path):
    assert (ROOT / path).exists()
