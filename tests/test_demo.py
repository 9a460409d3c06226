"""The demo's judgement, without its engines."""

import dataclasses
import io

import pytest
from rich.console import Console

from benchmarks import demo_store
from benchmarks.demo_table import PromptResult, print_results, problems, total_ratio

GOOD = PromptResult(
    name="a text",
    tokens=300,
    retrieved_tokens=288,
    expected_tokens=288,
    failed_frames=0,
    raw_bytes=4_000_000,
    stored_bytes=3_000_000,
    ttft_cold_s=2.0,
    ttft_warm_s=0.5,
    identical=True,
    identical_to_cold=False,
    text="[an answer] with\nbrackets",
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"identical": False}, "a text: the output differs"),
        ({"retrieved_tokens": 0}, "a text: 0 tokens were retrieved, 288 could have been"),
        ({"failed_frames": 2}, "a text: 2 frames could not be loaded"),
        ({"stored_bytes": 0}, "a text: nothing was stored"),
    ],
    ids=["good", "differs", "not-retrieved", "failed-loads", "not-stored"],
)
def test_problems(change, problem):
    results = [GOOD, dataclasses.replace(GOOD, **change)]
    assert problems(results) == ([problem] if problem else [])


def test_table_fits_a_terminal_and_shows_every_figure():
    console = Console(file=io.StringIO(), width=80)
    print_results(console, [GOOD, GOOD], block=32, generated=24)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert all(
        figure in text for figure in ("288", "4.00", "3.00", "1.333", "2.00 s", "0.50 s", "4.0 x")
    )
    assert "[an answer] with brackets" in text


def test_total_ratio_is_of_all_bytes():
    large = dataclasses.replace(GOOD, raw_bytes=30_000_000, stored_bytes=30_000_000)
    assert total_ratio([GOOD, large]) == 34 / 33


def test_store_that_never_changes_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_store, "TIMEOUT_S", 0.2)
    assert demo_store.wait_for_more(tmp_path, {}) == {}


def test_only_what_was_added_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_store, "QUIET_S", 0.1)
    (tmp_path / "a.data").write_bytes(b"12")
    before = demo_store.sizes(tmp_path)
    (tmp_path / "b.data").write_bytes(b"123")
    assert demo_store.wait_for_more(tmp_path, before) == {
        tmp_path / "a.data": 2,
        tmp_path / "b.data": 3,
    }
