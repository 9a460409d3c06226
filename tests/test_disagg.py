"""The benchmark of two servers: what it makes of measurements, apart from taking them."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import timeline
from benchmarks.disagg import table
from benchmarks.disagg.client import Answer, is_tie, same_tokens
from benchmarks.disagg.link import Traffic, bits_per_second
from benchmarks.disagg.servers import ARMS, groups_of, servers_of


def bf16(bits):
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


@given(st.integers(0x0080, 0x7F00), st.integers(0, 5), st.booleans())
def test_a_tie_is_one_step_of_bf16(bits, steps, negative):
    sign = -1 if negative else 1
    one, other = sign * bf16(bits), sign * bf16(bits + steps)
    assert is_tie(one, other) == is_tie(other, one)
    if steps <= 1:
        assert is_tie(one, other)
    if steps >= 3:  # Two steps below a power of two are as wide as one above it.
        assert not is_tie(one, other)


def test_tokens_may_differ_from_a_tie_on_only():
    logits = [{1: 20.0, 2: 19.0}, {3: 20.0, 4: 19.875, 5: 19.0}, {6: 9.0, 7: 8.0}]
    reference = Answer(0.0, token_ids=[1, 3, 6], logits=logits)

    def same(*tokens):
        return same_tokens(reference, Answer(0.0, token_ids=list(tokens)))

    assert same(1, 3, 6)
    assert same(1, 4, 99)  # What follows another token is another text.
    assert not same(1, 5, 6)
    assert not same(2, 3, 6)
    assert not same(1, 3, 8)  # Not even among the best.


def traffic_of(points):
    traffic = Traffic(SimpleNamespace())
    traffic.times = [moment for moment, _ in points]
    traffic.received = [received for _, received in points]
    traffic.sent = [0] * len(points)
    return traffic


def test_link_seconds_are_those_of_the_bytes():
    """10 s at 1,000 bytes a second, in an idle time that is twice as long."""
    points = [(t / 100, min(10_000, max(0, (t - 500) * 10))) for t in range(2001)]
    assert traffic_of(points).seconds == pytest.approx(10, rel=0.01)
    assert traffic_of(points).total_bytes == 10_000


def test_link_seconds_count_a_gap_and_leave_out_stray_packets():
    points = [(0.0, 0), (1.0, 10), (5.0, 10), (6.0, 5_000), (8.0, 5_000), (9.0, 10_000)]
    points += [(20.0, 10_010)]
    assert 3.9 < traffic_of(points).seconds < 4.1
    assert traffic_of([(0.0, 0), (1.0, 0)]).seconds == 0


def test_rates_are_those_of_tc():
    assert [bits_per_second(rate) for rate in ("20mbit", "1gbit", "500kbit")] == [2e7, 1e9, 5e5]
    with pytest.raises(ValueError, match="20 parsecs"):
        bits_per_second("20 parsecs")


@pytest.mark.parametrize("most", range(1, 12))
def test_arms_are_split_into_groups_that_fit(most):
    groups = groups_of(ARMS, most)
    assert sorted(arm for group in groups for arm in group) == sorted(ARMS)
    for group in groups:
        servers = set().union(*(servers_of(arm) for arm in group))
        assert len(servers) <= most or len(group) == 1


def measured(arm, link, repeat, ttft_s, link_bytes):
    return {
        "arm": arm,
        "model": "m",
        "link": link,
        "prompt_tokens": 100,
        "repeat": repeat,
        "ttft_s": ttft_s,
        "decode_ttft_s": ttft_s / 2,
        "link_bytes": link_bytes,
        "link_s": 1.0,
        "codec_s": 0.1,
        "tokens_equal": True,
        "tokens_identical": repeat != 1,
        "frames_failed": 0,
        **({"rps": 2.0} if repeat == 0 else {}),
    }


def test_rows_are_medians_in_the_order_of_links_and_arms(tmp_path):
    measurements = [
        measured(arm, link, repeat, ttft_s * (1 + repeat), nbytes)
        for repeat in (2, 0, 1)
        for link in ("unshaped", "1gbit", "20mbit")
        for arm, ttft_s, nbytes in (("fast", 1.0, 75_000_000), ("raw", 1.5, 100_000_000))
    ]
    rows = table.rows(measurements)
    assert [(row.link, row.arm) for row in rows] == [
        (link, arm) for link in ("20mbit", "1gbit", "unshaped") for arm in ("raw", "fast")
    ]
    raw = rows[0]
    assert (raw.ttft_s, raw.spread["ttft_s"], raw.repeats, raw.rps) == (3.0, (1.5, 4.5), 3, 2.0)
    assert raw.tokens_equal
    assert not raw.tokens_identical
    text = table.text(rows)
    assert "| 1.50 x | 1/1.333 | tie |" in text
    # At a rate where only bytes count, speed-up is their ratio.
    unshaped = {row.arm: row for row in rows if row.link == "unshaped"}
    slow = [table.predicted_ttft_s(unshaped[arm], 1e3) for arm in ("raw", "fast")]
    assert math.isclose(slow[0] / slow[1], 4 / 3, rel_tol=1e-4)
    table.plot(rows, tmp_path / "disagg.json")
    assert (tmp_path / "disagg-m.png").stat().st_size > 10_000


def test_timeline_counts_what_overlaps(tmp_path):
    trace = tmp_path / "worker-1.json"
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "worker"}},
        {"ph": "X", "name": "get", "ts": 100e6, "dur": 2e6, "tid": 1, "args": {"frame": "a"}},
        {"ph": "X", "name": "get", "ts": 101e6, "dur": 3e6, "tid": 2, "args": {"frame": "b"}},
        {"ph": "X", "name": "decode", "ts": 103.5e6, "dur": 1e6, "tid": 1, "args": {"frame": "a"}},
    ]
    # As a process leaves it that is still running, or was killed.
    trace.write_text("[\n" + "".join(f"{json.dumps(event)},\n" for event in events))
    spans = timeline.read_trace(trace, 100.0)
    gets = [span for span in spans if span.name == "get"]
    decodes = [span for span in spans if span.name == "decode"]
    assert timeline.busy_s(gets) == pytest.approx(4.0)
    assert timeline.overlap_s(decodes, gets) == pytest.approx(0.5)
