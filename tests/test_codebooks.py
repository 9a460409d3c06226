"""Shipped codebooks, the files that a user may name, and the command that makes them."""

import json
import subprocess
import sys
from importlib import resources

import numpy as np
import pytest
import xxhash

from benchmarks import models, texts
from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.shipped import codebook_for, load_codebook, shipped_names
from vllm_splitzip.commands.files import names_of
from vllm_splitzip.commands.main import main
from vllm_splitzip.errors import CodebookError

SMOLLM2 = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "head_dim": 64,
}


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_codebook_has_a_card_that_is_about_it(name):
    book = load_codebook(name)
    file = resources.files("vllm_splitzip.codebooks") / f"{name}.json"
    card = json.loads(file.read_text())["card"]
    assert card["digest"] == xxhash.xxh3_64_hexdigest(book.exponents)
    assert card["tokens"] > 10_000
    assert card["coverage"] > 0.99
    assert card["coverage"] + card["escape_rate"] == pytest.approx(1, abs=1e-6)
    assert {"model", "text", "held_out", "command"} <= card.keys()
    assert book.window is not None, "real codebooks are runs, which are coded by arithmetic"


def test_a_model_gets_its_own_codebook_and_others_the_one_for_any():
    assert codebook_for(SMOLLM2) == load_codebook("smollm2-135m")
    assert codebook_for({**SMOLLM2, "num_hidden_layers": 31}) == load_codebook("bf16-any")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": "bf16"}', '{"format": "fp8", "exponents": []}']
    + [
        json.dumps({"format": "bf16", "exponents": e})
        for e in ([1] * 16, [1, 2], [300] * 16, "x", 1 << 62)
    ]
    + ["[" * 100_000],
)
def test_a_malformed_file_is_refused(tmp_path, content):
    path = tmp_path / "book.json"
    path.write_text(content)
    with pytest.raises(CodebookError, match=r"book\.json"):
        load_codebook(str(path))


@pytest.mark.parametrize("name", ["no-such-book", "~nosuchuser/book.json", "a\0b"])
def test_a_missing_file_is_refused_with_what_there_is(name):
    with pytest.raises(CodebookError, match="shipped: bf16-any"):
        load_codebook(name)


@pytest.mark.parametrize("exponents", [b"", bytes(15), bytes(range(17)), bytes(16)])
def test_16_distinct_exponents_are_a_codebook(exponents):
    with pytest.raises(CodebookError):
        Codebook(exponents)


def test_the_16_most_frequent_exponents_are_taken():
    counts = np.zeros(256, np.int64)
    counts[100:130] = np.arange(30)
    assert Codebook.from_histogram(counts).exponents == bytes(range(114, 130))


def test_calibrate_writes_a_codebook_that_can_be_used(tmp_path):
    text, output = tmp_path / "text.txt", tmp_path / "book.json"
    text.write_text(next(iter(texts.held_out().values()))[:3000])
    model = models.ensure("smollm2-135m")
    command = [sys.executable, "-m", "vllm_splitzip.commands", "calibrate"]
    command += ["--model", str(model), "--text", str(text), "--output", str(output)]
    command += ["--held-out", str(text), "--tokens", "256", "--max-prompts", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    book = load_codebook(str(output))
    assert book.window is not None
    content = json.loads(output.read_text())
    assert content["model"] == SMOLLM2
    assert content["card"]["tokens"] == 256
    assert 0 < content["card"]["escape_rate"] < 0.01
    ratios = content["card"]["ratios"]["bf16"]
    assert 1.3 < ratios["fast"] < ratios["dense"] < ratios["max"]


def test_a_model_that_is_not_there_is_one_sentence(tmp_path):
    command = [sys.executable, "-m", "vllm_splitzip.commands", "calibrate"]
    (tmp_path / "text").write_text("text")
    command += ["--model", str(tmp_path), "--text", str(tmp_path / "text"), "--output", "y"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot load the model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["calibrate", "--output", "{}/no/book.json"], "a directory that does not exist"),
        (["calibrate", "--output", "{}"], "a directory; expected a file"),
        (["calibrate", "--output", "{}/book.json", "--tokens", "0"], "--tokens is 0"),
        (["calibrate", "--output", "{}/book.json", "--max-prompts", "-1"], "--max-prompts is -1"),
        (["calibrate", "--output", "{}/book.json", "--held-out", "{}/no"], "--held-out names"),
        (["analyze", "--json", "{}/no/a.json"], "a directory that does not exist"),
        (["analyze", "--picture", "{}/a.foo"], "can end in .png"),
        (["analyze", "--tokens", "255"], "256 or more"),
        (["analyze", "--text", "{}/text", "{}/text"], "names a file twice"),
        (["analyze", "--text", "{}/no"], "No such file"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    tmp_path, capsys, arguments, sentence
):
    (tmp_path / "text").write_text("text")
    rest = [each.format(tmp_path) for each in arguments[1:]]
    text = [] if "--text" in rest else ["--text", str(tmp_path / "text")]
    assert main([arguments[0], "--model", "no such model", *text, *rest]) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert "no such model" not in error


def test_texts_of_one_name_are_told_apart(tmp_path):
    files = [tmp_path / folder / "text" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(file.parent.name)
    assert names_of("--text", files) == {str(file): file for file in files}
    assert names_of("--text", files[:1]) == {"text": files[0]}


def test_calibrate_on_nothing_is_refused(tmp_path):
    (tmp_path / "text").write_text("")
    command = [sys.executable, "-m", "vllm_splitzip.commands", "calibrate"]
    command += ["--model", str(models.ensure("smollm2-135m")), "--text", str(tmp_path / "text")]
    command += ["--output", str(tmp_path / "book.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "texts have no tokens" in done.stderr
    assert not (tmp_path / "book.json").exists()


def test_analyze_measures_every_mode_and_draws(tmp_path):
    sources = list(texts.held_out().values())[:2]
    files = [tmp_path / f"text{i}.txt" for i in range(2)]
    for file, text in zip(files, sources, strict=True):
        file.write_text(text[:3000])
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    command = [sys.executable, "-m", "vllm_splitzip.commands", "analyze", "--tokens", "256"]
    command += ["--model", str(models.ensure("smollm2-135m")), "--text", *map(str, files)]
    command += ["--json", str(figures), "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads(figures.read_text())
    assert len(content["layers"]) == 2 * SMOLLM2["num_hidden_layers"]
    assert all(2 < row["entropy"] < 4 for row in content["layers"])
    assert content["ratios"]["fast"] < content["ratios"]["dense"] < content["ratios"]["max"]
    assert picture.read_bytes().startswith(b"\x89PNG")
