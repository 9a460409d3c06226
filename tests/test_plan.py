"""`vllm-splitzip plan`: KV cache by configuration, the table, and what it refuses."""

import json

import pytest
from transformers import CONFIG_MAPPING

from benchmarks import models
from vllm_splitzip.choice.costs import FRAMES, Codec, Link, Path, cost, costs
from vllm_splitzip.choice.decider import Decider
from vllm_splitzip.codec.modes import MODES
from vllm_splitzip.codec.shipped import measured_ratios, shipped_names
from vllm_splitzip.commands.kv_size import kv_size_of, load_config
from vllm_splitzip.commands.main import main
from vllm_splitzip.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def smollm2():
    return str(models.ensure("smollm2-135m"))


@pytest.fixture
def plan(capsys):
    def planned(*arguments):
        assert main(["plan", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return planned


@pytest.fixture
def refused(capsys):
    def message(*arguments):
        assert main(["plan", *arguments]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        [line] = printed.err.splitlines()
        return line

    return message


def config(kind, **values):
    return CONFIG_MAPPING[kind](**values).get_text_config(decoder=True)


@pytest.mark.parametrize(
    ("made", "token_bytes", "prompt_bytes"),
    [
        (
            config("llama", num_hidden_layers=32, num_key_value_heads=8, hidden_size=4096,
                   num_attention_heads=32),
            32 * 2 * 8 * 128 * 2, 10_000 * 32 * 2 * 8 * 128 * 2,
        ),
        # One latent of 512 and a rotary key of 64 for all heads.
        (config("deepseek_v3"), 61 * 576 * 2, 10_000 * 61 * 576 * 2),
        # A window in all layers, and in all but two of three.
        (config("mistral", sliding_window=4096), 131_072, 4096 * 131_072),
        (
            config("gemma3_text", num_hidden_layers=3, num_key_value_heads=1, head_dim=256,
                   sliding_window=512, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
            3 * 1024, 10_000 * 1024 + 2 * 512 * 1024,
        ),
        # Layers that read what others keep keep nothing; some heads are larger than others.
        (
            config("gemma4_text", num_hidden_layers=4, num_kv_shared_layers=2, head_dim=256,
                   num_key_value_heads=2, global_head_dim=512, sliding_window=512,
                   layer_types=["sliding_attention", "full_attention"] * 2),
            2 * 2 * 256 * 2 + 2 * 2 * 512 * 2, 512 * 2048 + 10_000 * 4096,
        ),
        (config("qwen2", use_sliding_window=False, sliding_window=1024, num_hidden_layers=2,
                num_key_value_heads=2, hidden_size=512, num_attention_heads=4), 2048, 20_480_000),
        (config("gpt2"), 12 * 2 * 768 * 2, 10_000 * 12 * 2 * 768 * 2),
        (config("falcon", multi_query=True, hidden_size=128, num_attention_heads=2,
                num_hidden_layers=1), 2 * 64 * 2, 2_560_000),
        (config("falcon", new_decoder_architecture=True, num_kv_heads=8, hidden_size=1024,
                num_attention_heads=16, num_hidden_layers=1), 2048, 20_480_000),
    ],
    ids=["GQA", "MLA", "window", "windows-and-full", "shared-layers", "window-unused", "MHA", "MQA",
         "falcon-GQA"],
)  # fmt: skip
def test_kv_cache_by_configuration(made, token_bytes, prompt_bytes):
    size = kv_size_of(made, "bfloat16")
    assert size.token_bytes == token_bytes
    assert size.prompt_bytes(10_000) == prompt_bytes
    for fp8 in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        assert kv_size_of(made, fp8).token_bytes == token_bytes // 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("qwen3_next", "linear_attention"), ("mamba", "linear_attention"), ("t5", "encoder")],
)
def test_models_without_a_kv_cache_of_tokens_are_refused(kind, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        kv_size_of(config(kind))


def test_a_configuration_that_contradicts_itself_is_refused():
    made = config("llama")
    made.num_attention_heads = 0
    with pytest.raises(UnsupportedModelError, match="num_attention_heads 0; expected"):
        kv_size_of(made)
    made = config("llama", dtype="float64")
    with pytest.raises(UnsupportedModelError, match="float64; expected"):
        kv_size_of(made)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_key_value_heads", -3),
        ("head_dim", -64),
        ("sliding_window", -5),
        ("sliding_window", 0),
        ("num_kv_shared_layers", 1000),
        ("num_kv_shared_layers", -1),
    ],
)
def test_a_configuration_of_impossible_numbers_is_refused(name, value):
    made = config("llama")
    kv_size_of(made)
    setattr(made, name, value)
    with pytest.raises(UnsupportedModelError, match=name):
        kv_size_of(made)


def test_a_model_that_transformers_does_not_know_is_read_by_its_names(tmp_path):
    content = {"model_type": "never-heard-of", "num_hidden_layers": 2, "num_attention_heads": 4}
    content |= {"num_key_value_heads": 2, "hidden_size": 256, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    size = kv_size_of(load_config(str(tmp_path)))
    assert (size.token_bytes, size.format) == (2 * 2 * 2 * 64 * 2, "fp16")


def test_the_table_is_the_arithmetic_of_auto(plan, smollm2):
    given = ["--encode", "4GB/s", "--decode", "5GB/s"]
    found = plan("--link", "800Mbit/s", "--model", smollm2, *given, "--prompt-tokens", "2000")
    assert found["kv_bytes_per_token"] == 23_040
    assert found["kv_bytes"] == 2000 * 23_040
    assert (found["frames"], found["link_bytes_per_s"]) == (8, 1e8)
    ratios = measured_ratios("smollm2-135m")["bf16"] | {"raw": 1.0}
    raw = Codec(1.0, float("inf"), float("inf"))
    codecs = {mode: Codec(ratios[mode], 4e9, 5e9) for mode in ratios} | {"raw": raw}
    link = Link(0.0, 1e8)
    for row in found["rows"]:
        expected = cost(codecs[row["mode"]], Path(link, link, 2000 * 23_040 / 8, 8))
        assert row["seconds"]["total"] == expected.total
        assert row["seconds"]["put"] == pytest.approx(2000 * 23_040 / row["ratio"] / 1e8)
    assert [row["mode"] for row in found["rows"]] == list(MODES)
    decider = Decider("fast")
    decider.decide(costs(codecs, Path(link, link, 2000 * 23_040 / 8, FRAMES)), 0)
    assert found["auto"] == decider.mode == "max"


@pytest.mark.parametrize("rate", ["20Mbit/s", "1GB/s", "4GB/s", "50GB/s", "4TB/s"])
def test_a_mode_pays_where_the_table_says_so(plan, smollm2, rate):
    given = ["--encode", "4GB/s", "--decode", "5GB/s"]
    found = plan("--link", rate, "--model", smollm2, *given)
    raw, *others = found["rows"]
    for row in others:
        pays = row["seconds"]["total"] < raw["seconds"]["total"]
        assert pays == (found["link_bytes_per_s"] < row["pays_below"])


def test_speeds_are_measured_where_none_are_given(plan, smollm2):
    found = plan("--link", "20Mbit/s", "--model", smollm2)
    assert "measured now" in found["speeds_from"]
    for row in found["rows"]:
        assert 1e7 < row["encode_bytes_per_s"] < 1e12
        assert 1e7 < row["decode_bytes_per_s"] < 1e12
    assert found["auto"] in ("dense", "max")


@pytest.mark.parametrize("dtype", ["float16", "fp8", "fp8_e5m2"])
def test_modes_that_do_not_code_a_format_are_not_offered(plan, smollm2, dtype):
    found = plan("--link", "20Mbit/s", "--model", smollm2, "--kv-cache-dtype", dtype)
    expected = {"raw", "dense", "max"} | ({"fast"} if dtype == "fp8_e5m2" else set())
    assert {row["mode"] for row in found["rows"]} == expected


def test_the_papers_figures_are_called_the_papers(capsys, smollm2):
    arguments = ["plan", "--link", "50GB/s", "--model", smollm2, "--gpu", "paper"]
    assert main([*arguments, "--prefill-tokens-per-s", "20000"]) == 0
    text = capsys.readouterr().out
    assert "not measured by us" in text
    assert "2605.01708" in text
    assert "codec 'auto' would take 'fast' here" in text
    assert "less than 0.2048 s of prefill" in text
    assert "dense " not in text


def test_ratios_of_ones_own_model(plan, refused, smollm2, tmp_path):
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"ratios": {"fast": 1.2, "dense": 1.3, "max": 1.9}, "layers": []}))
    arguments = ["--link", "1GB/s", "--model", smollm2, "--encode", "1GB/s", "--decode", "1GB/s"]
    found = plan(*arguments, "--ratios", str(path))
    assert [row["ratio"] for row in found["rows"]] == [1.0, 1.2, 1.3, 1.9]
    for damaged in ("", "[]", '{"ratios": 3}', '{"ratios": {}}', '{"ratios": {"max": -1}}'):
        path.write_text(damaged)
        assert "--ratios is" in refused(*arguments, "--ratios", str(path))
    assert "bf16" in refused(*arguments, "--ratios", str(path), "--kv-cache-dtype", "fp8")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--link", "50Gb/s"], "a rate is '50Gb/s'; allowed"),
        (["--link", "fast"], "a rate is 'fast'; allowed"),
        (["--prompt-tokens", "0"], "--prompt-tokens is 0; allowed"),
        (["--latency-ms", "-1"], "--latency-ms is -1; allowed"),
        (["--latency-ms", "nan"], "--latency-ms is nan; allowed"),
        (["--prefill-tokens-per-s", "0"], "--prefill-tokens-per-s is 0; allowed"),
        (["--encode", "3GB/s"], "belong together"),
        (["--encode", "3GB/s", "--decode", "3"], "a rate is '3'"),
        (["--gpu", "paper", "--decode", "3GB/s"], "one or the other"),
        (["--model", "/nowhere/at/all"], "no configuration of a model '/nowhere/at/all'"),
    ],
)
def test_what_is_not_allowed_is_one_sentence(refused, smollm2, arguments, reason):
    assert reason in refused("--link", "1GB/s", "--model", smollm2, *arguments)


@pytest.mark.parametrize("content", ["", "[]", "{}", "{", '{"model_type": "llama", "dtype": 3}'])
def test_a_damaged_configuration_is_one_sentence(refused, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    refused("--link", "1GB/s", "--model", str(tmp_path), "--gpu", "paper")


@pytest.mark.parametrize("name", shipped_names())
def test_cards_have_the_ratio_of_every_mode_and_format(name):
    ratios = measured_ratios(name)
    for number_format, by_mode in ratios.items():
        coding = {mode for mode in MODES if number_format in MODES[mode].streams} - {"raw"}
        assert set(by_mode) == coding
        assert all(1 < ratio < 2 for ratio in by_mode.values())
    assert set(ratios) == {"bf16", "fp16", "e4m3", "e5m2"}
