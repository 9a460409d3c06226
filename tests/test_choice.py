"""The arithmetic behind `codec: auto` and `vllm-splitzip plan`, on made-up and on noisy speeds."""

import math
import random
import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_splitzip.choice.clock import MOST, BusyClock
from vllm_splitzip.choice.costs import Codec, Link, Path, break_even, cost, costs, overlapped
from vllm_splitzip.choice.decider import CALM, DWELL, MARGIN, MOST_DWELL, Decider
from vllm_splitzip.choice.estimates import WINDOW, LinkEstimate, Quotient
from vllm_splitzip.choice.units import parse_rate, rate_text
from vllm_splitzip.errors import SettingError

RAW = Codec(1.0, 10e9, 12e9)
CODECS = {
    "raw": RAW,
    "fast": Codec(1.33, 5e9, 6e9),
    "dense": Codec(1.43, 3.5e9, 4e9),
    "max": Codec(1.5, 4e9, 3e9),
}
FRAME = 6e6


def symmetric(rate, frames=4, latency_s=0.0):
    link = Link(latency_s, rate)
    return Path(link, link, FRAME, frames)


def best(rate):
    totals = costs(CODECS, symmetric(rate))
    return min(totals, key=totals.get)


# Costs


def test_one_frame_is_not_overlapped_and_many_are():
    assert overlapped(3.0, 1.0, 1) == 4.0
    assert overlapped(1.0, 3.0, 1000) == pytest.approx(3.001)


def test_seconds_of_a_request_add_up_as_the_model_says():
    path = Path(Link(0.5, 1e6), Link(0.1, 2e6), 1e6, 4)
    seconds = cost(Codec(2.0, 1e6, 4e6), path)
    assert (seconds.encode, seconds.put, seconds.decode) == (4.0, 4.0, 1.0)
    assert seconds.get == pytest.approx(4 * (0.1 + 0.25))
    assert seconds.total == pytest.approx(4 + 4 + 1.4 + 1 / 4)


def test_slow_links_get_max_and_fast_ones_raw():
    assert best(2.5e6) == "max"
    assert best(1e12) == "raw"
    order = [best(10**exponent) for exponent in range(6, 13)]
    ratios = [CODECS[mode].ratio for mode in order]
    assert ratios == sorted(ratios, reverse=True)


rates = st.floats(1e6, 1e12)
codecs = st.builds(Codec, st.floats(1.01, 4.0), st.floats(1e7, 1e13), st.floats(1e7, 1e13))


@settings(deadline=None)
@given(codec=codecs, frames=st.integers(1, 64), share=st.floats(0.01, 0.99))
def test_a_codec_pays_below_its_break_even_rate_and_not_above(codec, frames, share):
    raw = Codec(1.0, math.inf, math.inf)
    rate = break_even(codec, raw, FRAME, frames)
    assert 0 < rate < math.inf

    def saves(rate):
        path = symmetric(rate, frames)
        return cost(raw, path).total - cost(codec, path).total

    assert saves(rate * share) > 0 > saves(rate / share)


def test_a_codec_that_costs_nothing_always_pays_and_one_that_saves_nothing_never():
    assert break_even(Codec(1.3, 20e9, 20e9), RAW, FRAME, 4) == math.inf
    assert break_even(Codec(1.0, 1e9, 1e9), RAW, FRAME, 4) == 0.0


@settings(deadline=None)
@given(rate=rates, latency_s=st.floats(0, 1))
def test_latency_takes_nothing_from_what_a_mode_saves(rate, latency_s):
    """All modes have as many frames. What it can do is hide decoding, of which raw has least."""
    near, far = (costs(CODECS, symmetric(rate, latency_s=each)) for each in (0.0, latency_s))
    for mode in CODECS:
        saved = near["raw"] - near[mode]
        assert far["raw"] - far[mode] >= saved - 1e-9 * far["raw"]


# Rates


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("50GB/s", 50e9),
        ("20Mbit/s", 2.5e6),
        ("1 Gbit/s", 125e6),
        ("1.5 TB/s", 1.5e12),
        ("400Gbit/s", 50e9),
        (" 8bit/s ", 1.0),
        ("2GiB/s", 2.0**31),
        ("64KiB/s", 65536.0),
        ("64kB/s", 64000.0),
        (".5MB/s", 5e5),
    ],
)
def test_rates_are_read(text, bytes_per_s):
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    "text",
    ["", "50", "50GB", "50Gb/s", "50gB/s", "50Gbps", "-1GB/s", "0GB/s", "1e9B/s", "nanB/s",
     "1,5GB/s", "50 G B/s", "50GB/s/s", "50KB/s", "5kiB/s", "1.GB/s", "9" * 400 + "GB/s",
     "٣GB/s", "GB/s", "0.0000Mbit/s", "50GB/S"],
)  # fmt: skip
def test_what_is_no_rate_is_refused_with_what_is(text):
    with pytest.raises(SettingError) as error:
        parse_rate(text)
    assert repr(text) in str(error.value)
    assert "50GB/s" in str(error.value)


@settings(deadline=None)
@given(st.floats(1, 1e15))
def test_a_rate_that_is_printed_can_be_read(rate):
    assert parse_rate(rate_text(rate)) == pytest.approx(rate, rel=6e-3)


# Estimates


@settings(deadline=None)
@given(
    latency_s=st.floats(0, 0.2),
    rate=st.floats(1e6, 1e10),
    sizes=st.lists(st.integers(1000, 10_000_000), min_size=WINDOW, max_size=3 * WINDOW),
)
def test_latency_and_bandwidth_are_told_apart_where_sizes_differ(latency_s, rate, sizes):
    sizes[-4:] = [1_000_000, 2_000_000, 4_000_000, 8_000_000]
    estimate = LinkEstimate()
    for nbytes in sizes:
        estimate.add(nbytes, latency_s + nbytes / rate)
    link = estimate.link()
    for nbytes in (1_000_000, 8_000_000):
        exact = latency_s + nbytes / rate
        assert link.seconds(nbytes) == pytest.approx(exact, rel=1e-3, abs=1e-9)


def test_with_frames_of_one_size_latency_is_that_of_an_empty_round_trip():
    estimate = LinkEstimate(latency_s=0.05)
    for _ in range(WINDOW):
        estimate.add(1e6, 0.06)
    assert estimate.link().latency_s == 0.05
    assert estimate.link().bytes_per_s == pytest.approx(1e8)


@settings(deadline=None)
@given(seed=st.integers(0, 1000), pauses=st.integers(0, 2))
def test_a_pause_of_the_machine_is_not_the_links(seed, pauses):
    noise = random.Random(seed)
    objects = [(1e6, 0.01 * noise.uniform(0.9, 1.1)) for _ in range(WINDOW)]
    for place in noise.sample(range(WINDOW), pauses):
        objects[place] = (1e6, 5.0)
    estimate = LinkEstimate()
    for nbytes, seconds in objects:
        estimate.add(nbytes, seconds)
    assert 0.85e8 < estimate.link().bytes_per_s < 1.15e8


@pytest.mark.parametrize("factor", [0.1, 10])
@pytest.mark.parametrize("pauses", [0, 2])
def test_a_link_that_changed_is_another_after_three_objects(factor, pauses):
    estimate = LinkEstimate()
    for n in range(2 * WINDOW):
        estimate.add(4e6, 5.0 if n < pauses else 0.04 + 0.001 * (n % 3))
    for _ in range(2):
        estimate.add(4e6, 0.04 * factor)
        assert estimate.link().bytes_per_s == pytest.approx(1e8, rel=0.3), "may be a pause"
    estimate.add(4e6, 0.04 * factor)
    assert estimate.link().bytes_per_s == pytest.approx(1e8 / factor, rel=0.1)


def test_objects_of_another_size_are_no_other_link():
    """They take longer, or less time for each byte, where there is latency."""
    estimate = LinkEstimate()
    for nbytes in [1000] * WINDOW + [8_000_000] * 4 + [1000] * 4:
        estimate.add(nbytes, 0.1 + nbytes / 1e8)
    assert estimate.link().latency_s == pytest.approx(0.1)
    assert estimate.link().bytes_per_s == pytest.approx(1e8)


def test_nothing_measured_is_no_link():
    estimate = LinkEstimate(0.1)
    estimate.add(0, 1.0)
    estimate.add(10, -1.0)
    assert estimate.link() is None
    assert estimate.seen == 0


def test_a_quotient_is_what_was_expected_until_it_is_measured():
    ratio = Quotient(1.4)
    for n in range(3):
        ratio.add(150, 100)
        assert (ratio.value, ratio.is_measured) == (1.4, False), n
    ratio.add(150, 100)
    assert ratio.value == 1.5


def test_estimates_forget():
    estimate, quotient = LinkEstimate(), Quotient()
    for n in range(1, 5 * WINDOW):
        fast = n > 3 * WINDOW
        estimate.add(1e6, 0.001 if fast else 1.0)
        quotient.add(2 if fast else 1, 1)
    assert estimate.link().bytes_per_s == pytest.approx(1e9)
    assert quotient.value == 2


# Time under way


def test_objects_that_share_a_link_are_not_counted_twice():
    now = [0.0]
    reports = []
    clock = BusyClock(lambda amount, seconds: reports.append((amount, seconds)), lambda: now[0])
    for _ in range(4):
        clock.enter()
    for _ in range(4):
        now[0] += 1.0
        clock.leave(100.0)
    assert reports == [(400.0, 4.0)]
    now[0] = 50.0  # Idle time is nobody's.
    clock.enter()
    now[0] = 52.0
    clock.leave(100.0)
    assert reports[1:] == [(100.0, 2.0)]


def test_what_moved_nothing_is_not_measured():
    now = [0.0]
    reports = []
    clock = BusyClock(lambda *report: reports.append(report), lambda: now[0])
    clock.enter()
    now[0] = 30.0
    clock.leave(0)
    assert reports == []
    clock.enter()
    now[0] = 31.0
    clock.leave(5)
    assert reports == [(5.0, 1.0)]


def test_a_clock_that_is_never_idle_reports_too():
    now = [0.0]
    reports = []
    clock = BusyClock(lambda *report: reports.append(report), lambda: now[0])
    clock.enter()
    for _ in range(10 * MOST):
        clock.enter()
        now[0] += 0.5
        clock.leave(10)
    assert sum(seconds for _, seconds in reports) > 0
    assert len(reports) == 10
    # Two at most were under way, so that a round is two objects.
    assert all(amount / seconds == pytest.approx(20.0) for amount, seconds in reports)


def test_a_clock_is_for_many_threads():
    total = []
    clock = BusyClock(lambda amount, seconds: total.append((amount, seconds)))

    def work():
        for _ in range(2000):
            clock.enter()
            clock.leave(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock._under_way == 0
    assert all(amount > 0 and seconds >= 0 for amount, seconds in total)


# Decisions


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_is_measured_a_mode_stays_for_its_dwell(data):
    decider = Decider("fast")
    frames, changes = 0, []
    steps = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=200))
    seed = random.Random(data.draw(st.integers(0, 10_000)))
    for step in steps:
        totals = {mode: 10 ** seed.uniform(-6, 3) for mode in CODECS}
        before = decider.mode
        changed = decider.decide(totals, frames)
        assert changed == (decider.mode != before)
        if changed:
            assert totals[decider.mode] <= (1 - MARGIN) * totals[before]
            assert totals[decider.mode] == min(totals.values())
            changes.append(frames)
        assert DWELL <= decider.dwell <= MOST_DWELL
        frames += step
    assert all(b - a >= DWELL for a, b in pairwise(changes))
    assert len(changes) <= 1 + frames / DWELL


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    noise=st.floats(0.0, 0.5),
    exponent=st.floats(6.0, 11.0),
)
def test_noise_moves_nothing_back_and_forth(seed, noise, exponent):
    """A steady link and codec, measured with noise, for 600 frames."""
    source = random.Random(seed)
    rate = 10**exponent
    estimate, load = LinkEstimate(), Quotient()
    decider = Decider("fast")
    changes = 0
    for frame in range(600):
        stored = FRAME / CODECS[decider.mode].ratio
        estimate.add(stored, stored / rate * source.lognormvariate(0, noise))
        load.add(source.lognormvariate(0, noise), 1.0)
        link = estimate.link()
        slowed = {
            mode: Codec(
                c.ratio, c.encode_bytes_per_s / load.value, c.decode_bytes_per_s / load.value
            )
            for mode, c in CODECS.items()
        }
        changes += decider.decide(costs(slowed, Path(link, link, FRAME, 4)), frame)
    # The dwell doubles each time: 16 + 32 + 64 + ... frames. Calm makes it short once in a while.
    assert changes <= 2 + math.log2(600 / DWELL) + 600 / (CALM * DWELL)


@given(old=st.floats(6.0, 7.0), new=st.floats(11.0, 12.0), noise=st.floats(0, 0.3))
@settings(max_examples=15, deadline=None)
def test_a_link_that_changed_changes_the_mode_once(old, new, noise):
    source = random.Random(int(1e6 * old))
    estimate, decider, modes = LinkEstimate(), Decider("fast"), []
    for frame in range(400):
        rate = 10 ** (old if frame < 200 else new)
        stored = FRAME / CODECS[decider.mode].ratio
        estimate.add(stored, stored / rate * source.lognormvariate(0, noise))
        link = estimate.link()
        if decider.decide(costs(CODECS, Path(link, link, FRAME, 4)), frame):
            modes.append((frame, decider.mode))
    assert [mode for _, mode in modes] == ["max", "raw"]
    assert 200 < modes[1][0] <= 200 + 2 * WINDOW


def test_little_evidence_changes_the_mode_for_a_large_gain_only():
    for totals, evidence, changed in (
        ({"fast": 1.0, "max": 0.9}, 3 / WINDOW, False),
        ({"fast": 1.0, "max": 0.8}, 3 / WINDOW, True),
        ({"fast": 1.0, "max": 0.9}, 1.0, True),
        ({"fast": 1.0, "max": 0.98}, 1.0, False),
    ):
        assert Decider("fast").decide(totals, 0, evidence) == changed


def test_coming_back_doubles_the_dwell_and_calm_ends_that():
    decider = Decider("fast")
    worse = {"fast": {"fast": 2.0, "max": 1.0}, "max": {"fast": 1.0, "max": 2.0}}
    frame, changes = 0, []
    while len(changes) < 5:
        if decider.decide(worse[decider.mode], frame):
            changes.append(frame)
        frame += 1
    stays = [b - a for a, b in pairwise(changes)]
    assert stays == [DWELL, 2 * DWELL, 4 * DWELL, 8 * DWELL]
    frame += CALM * decider.dwell
    assert not decider.decide({"fast": 1.0, "max": 1.0}, frame)
    assert decider.dwell == DWELL
