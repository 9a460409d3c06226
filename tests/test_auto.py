"""`codec: auto` from blocks to real stores and back: it takes the mode that the link is worth."""

import time
from contextlib import contextmanager
from functools import partial
from threading import Event
from types import SimpleNamespace

import msgpack
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from slow_link import SlowLink
from storage_helpers import BlackHole, lm_server, opened, put, redis_server, wait_for
from vllm_splitzip.choice.clock import BusyClock
from vllm_splitzip.choice.costs import Link
from vllm_splitzip.codec import host
from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.modes import MODES
from vllm_splitzip.codec.shipped import measured_ratios
from vllm_splitzip.connector.auto import AutoCodec
from vllm_splitzip.connector.counters import Counters
from vllm_splitzip.connector.geometry import Geometry, Part
from vllm_splitzip.connector.keys import KeySpace
from vllm_splitzip.connector.loader import Loader
from vllm_splitzip.connector.measured import MeasuredStore, round_trip_s
from vllm_splitzip.connector.messages import LoadFrame, LoadJob, SaveFrame
from vllm_splitzip.connector.pages import host_pages
from vllm_splitzip.connector.reports import FRESH_S, PERIOD_S, LinkReports
from vllm_splitzip.connector.saver import Saver
from vllm_splitzip.connector.speeds import Speed, measure, sample_like
from vllm_splitzip.connector.stats import SplitZipPromMetrics, SplitZipStats
from vllm_splitzip.connector.streams import HostStreams
from vllm_splitzip.connector.writer import Writer
from vllm_splitzip.frame import unpack
from vllm_splitzip.storage import open_store

BLOCK, PER_FRAME, LAYERS, FRAMES = 16, 16, 6, 4
GEOMETRY = Geometry(BLOCK, BLOCK, PER_FRAME, (1,), (Part(0, None, (0,)),))
KEYS = KeySpace("sz1-0123456789abcdef", 0, 1)
BOOK = Codebook(bytes(range(115, 131)))
BLOCKS = PER_FRAME * FRAMES
SHAPE = (BLOCKS, 4, BLOCK, 128)
FRAME_BYTES = LAYERS * 2 * torch.Size(SHAPE).numel() // FRAMES


class Rank:
    """What a worker has: pages, store, saver, loader.

    Its codec is taken to be so many times as slow, beside a copy, as it was measured to be.
    """

    def __init__(self, extra, codec, now=time.time, slower=1):
        host.warm_up()
        self.caches = {
            f"layer{n}": sample_like(torch.empty(SHAPE, dtype=torch.bfloat16), BLOCKS, "auto")
            for n in range(LAYERS)
        }
        self.pages = {
            name: host_pages(name, 0, cache, BLOCKS) for name, cache in self.caches.items()
        }
        self.counters, streams = Counters(), HostStreams()
        self.store = store = open_store(extra, max_object_bytes=FRAME_BYTES + (1 << 16))
        self.auto = None
        if codec == "auto":
            tables = [list(range(n * PER_FRAME, (n + 1) * PER_FRAME)) for n in range(FRAMES)]
            speeds = measure(self.pages["layer0"], tables, sorted(MODES), BOOK, streams)
            speeds |= {
                mode: Speed(speed.encode / slower, speed.decode / slower)
                for mode, speed in speeds.items()
                if mode != "raw"
            }
            self.auto = AutoCodec(
                speeds,
                measured_ratios("bf16-any")["bf16"],
                FRAME_BYTES,
                round_trip_s(store, KEYS.object_key(bytes(32), 0)),
                self.counters,
                is_host=True,
            )
            reports = LinkReports(store, note_key, now)
            store, codec = MeasuredStore(store, self.auto, reports), self.auto.mode
        self.writer = Writer(store, self.counters, 1 << 30)
        self.saver = Saver(
            GEOMETRY, self.pages, KEYS, self.writer, streams, self.counters,
            mode=codec, book=BOOK, verify=0.0, auto=self.auto,
        )  # fmt: skip
        self.loader = Loader(
            GEOMETRY, self.pages, KEYS, store, streams, self.counters, 30.0, auto=self.auto
        )

    def fill(self, seed):
        """New KV cache, whose frames are of the same size."""
        for n, cache in enumerate(self.caches.values()):
            cache.copy_(cache.roll(1 + seed % 7, dims=0).neg() if n % 2 else cache.roll(1, dims=2))

    def save(self, turn, frames=FRAMES):
        saves = [
            SaveFrame(
                key_of(turn, n), PER_FRAME, (list(range(n * PER_FRAME, (n + 1) * PER_FRAME)),)
            )
            for n in range(frames)
        ]
        for name in self.caches:
            self.saver.save_layer(name, saves)
        self.saver.finish(saves)
        while self.writer._waiting_bytes:
            time.sleep(0.001)

    def load(self, turn, frames=FRAMES):
        loads = [
            LoadFrame(
                key_of(turn, n), PER_FRAME, (list(range(n * PER_FRAME, (n + 1) * PER_FRAME)),)
            )
            for n in range(frames)
        ]
        self.loader.submit(LoadJob("request", loads))
        while not (finished := self.loader.take_finished()).requests:
            time.sleep(0.001)
        assert not finished.failed

    def bits(self):
        return {name: cache.view(torch.int16).clone() for name, cache in self.caches.items()}

    def modes_of(self, turn, frame):
        key = KEYS.object_key(key_of(turn, frame), 0)
        with self.store.get(key, 10.0) as fetched:
            return {layer.coded.mode for layer in unpack(fetched.data, KEYS.key_bytes(key)).layers}

    def close(self):
        self.loader.close()
        self.writer.close(30)
        self.store.close()


def note_key(digest):
    return KEYS.object_key(digest, 0)


def key_of(turn, frame):
    return (turn * FRAMES + frame + 1).to_bytes(32, "big")


@contextmanager
def rank(extra, codec="auto", **options):
    opened = Rank(extra, codec, **options)
    try:
        yield opened
    finally:
        opened.close()


def there_and_back(ranks, turns):
    """Save at the first rank and load at the last, bit for bit, turn after turn."""
    first, last = ranks[0], ranks[-1]
    for turn in turns:
        first.fill(turn)
        first.save(turn)
        expected = first.bits()
        for cache in last.caches.values():
            cache.fill_(7.0)
        last.load(turn)
        for name, bits in last.bits().items():
            assert torch.equal(bits, expected[name]), (turn, name)
        for name, cache in first.caches.items():  # The next turn's are made of this one's.
            cache.view(torch.int16).copy_(expected[name])


@pytest.mark.parametrize(
    ("kind", "start", "tiers"),
    [
        ("redis", redis_server, {}),
        ("lm", lm_server, {}),
        # Loads come from memory; a put takes what the slowest tier takes.
        ("redis", redis_server, {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": 1 / 16}),
    ],
    ids=["redis", "lm", "memory-then-redis"],
)
def test_a_slow_link_gets_small_frames(kind, start, tiers, tmp_path, caplog):
    caplog.set_level("INFO")
    server = start(tmp_path)
    link = SlowLink(server.port, 20e6)
    try:
        with rank({"lmcache.remote_url": f"{kind}://127.0.0.1:{link.port}", **tiers}) as one:
            assert one.auto.mode == "fast"
            there_and_back([one], range(6))
            assert one.auto.mode in ("dense", "max")
            counts = one.counters.take()
    finally:
        link.close()
        server.kill()
    assert counts["frames_failed"] == counts["frames_dropped"] == 0
    assert counts["raw_bytes_saved"] / counts["stored_bytes_saved"] > 1.3
    in_use = {mode: counts[f"codec_{mode}"] for mode in MODES}
    assert in_use == dict.fromkeys(MODES, 0) | {one.auto.mode: 1}
    lines = changes(caplog)
    assert len(lines) == counts["codec_switches"] >= 1
    assert f"as {one.auto.mode!r}, no longer as" in lines[-1]
    assert "MB/s after" in lines[-1]


def test_local_memory_gets_raw_frames(caplog):
    """Sooner or later: on a busy machine, and in memory not touched before, copies are slow.

    `fast` is as fast as a copy on some processors, and would be as good a choice.
    """
    caplog.set_level("INFO")
    tiers = {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": 1 / 16}
    with rank(tiers, slower=4) as one:
        for turn in range(100):
            there_and_back([one], [turn])
            if one.auto.mode == "raw":
                break
        assert one.auto.mode == "raw", changes(caplog)
        there_and_back([one], range(100, 103))


def test_a_store_is_shared_by_engines_of_any_codec(tmp_path):
    """Keys do not depend on the mode, and a reader decodes what each layer says it is."""
    extra = {"lmcache.remote_url": f"fs://localhost:0{tmp_path}"}
    with rank(extra) as auto, rank(extra, "raw") as raw, rank(extra, "max") as small:
        there_and_back([auto, raw], range(3))
        there_and_back([raw, auto], range(3, 6))
        there_and_back([small, auto], range(6, 9))
        there_and_back([auto, small], range(9, 12))
        found = [auto.modes_of(turn, frame) for turn in range(12) for frame in range(FRAMES)]
        own, others = found[: 3 * FRAMES] + found[9 * FRAMES :], found[3 * FRAMES : 9 * FRAMES]
        assert others == [{"raw"}] * 3 * FRAMES + [{"max"}] * 3 * FRAMES
        assert {"raw", "fast", "dense", "max"} >= set().union(*own)
        assert any(len(modes) == 2 for modes in own), "no layer was tried in another mode"
        names = {path.name for path in tmp_path.glob("*.data")}
        before = len(names)
        raw.caches["layer0"].zero_()
        raw.save(0)  # What `auto` has stored is there under the keys that `raw` would use.
        assert len(list(tmp_path.glob("*.data"))) == before


def test_what_is_measured_at_start_up_is_like_the_models():
    cache = torch.empty((1, 8, 16, 256), dtype=torch.bfloat16)
    for layer in (cache, torch.empty((1, 1, 16, 576), dtype=torch.uint8)):
        sample = sample_like(layer, 4, "fp8")
        assert sample.shape == (4, *layer.shape[1:])
        assert sample.dtype == layer.dtype


def test_a_store_that_does_not_answer_has_no_round_trip():
    silent = BlackHole()
    try:
        with opened({"lmcache.remote_url": f"redis://127.0.0.1:{silent.port}"}) as store:
            begin = time.monotonic()
            assert round_trip_s(store, KEYS.object_key(bytes(32), 0)) == 0.0
            assert time.monotonic() - begin < 1
    finally:
        silent.close()


def test_a_put_that_was_given_up_late_counts_and_one_that_was_refused_does_not(tmp_path):
    server = redis_server(tmp_path)
    link = SlowLink(server.port, 1e5)
    data = bytes(300_000)
    seen = []
    auto = AutoCodec({"raw": Speed(1e9, 1e9)}, {}, 1 << 20, 0.0, Counters(), is_host=True)
    auto.puts = auto.gets = BusyClock(lambda nbytes, seconds: seen.append((nbytes, seconds)))
    try:
        with opened({"lmcache.remote_url": f"redis://127.0.0.1:{link.port}"}) as store:
            measured = MeasuredStore(store, auto, LinkReports(store, note_key))
            assert not measured.put(KEYS.object_key(bytes(32), 0), [data], len(data), 1.2)
            [(nbytes, seconds)] = seen
            assert (nbytes, seconds >= 1.2) == (300_000, True)
            link.close()
            server.kill()
            assert wait_for(lambda: not put(store, 1, b"x", 0.5) and store.health == "down")
            assert not measured.put(KEYS.object_key(bytes(32), 0), [data], len(data), 5.0)
            assert measured.get(KEYS.object_key(bytes(32), 0), 5.0) is None
            assert len(seen) == 1
    finally:
        link.close()
        server.kill()


def test_no_frame_waits_for_notes(tmp_path):
    """A store that is slow to say what it has delays what engines tell each other, nothing else."""
    answered = Event()

    class SlowReports(LinkReports):
        def latest(self):
            assert answered.wait(30)
            return Link(0.5, 1e6)

    auto = AutoCodec({"raw": Speed(1e9, 1e9)}, {}, 1 << 20, 0.0, Counters(), is_host=True)
    heard = []
    auto.heard = heard.append
    store = open_store({"lmcache.remote_url": f"fs://localhost:0{tmp_path}"}, max_object_bytes=4096)
    measured = MeasuredStore(store, auto, SlowReports(store, note_key))
    try:
        keys = [KEYS.object_key(key_of(0, n), 0) for n in range(3)]
        assert all(measured.put(key, [b"frame"], 5, 5.0) for key in keys)
        assert heard == []
    finally:
        answered.set()
        measured.close()
    assert heard == [Link(0.5, 1e6)], "two puts found the notes' thread busy"
    assert measured.get(keys[0], 0.1) is None, "closed, and no error"


def test_what_is_in_use_is_a_metric():
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = SplitZipPromMetrics(config, kinds, ["model", "engine"], {0: ["m", "0"]})

    def in_use():
        labels = {"model": "m", "engine": "0"}
        return {
            mode: registry.get_sample_value("vllm:splitzip_codec", labels | {"codec": mode})
            for mode in MODES
        }

    ranks = SplitZipStats(data={"codec_fast": 1.0}).aggregate(SplitZipStats({"codec_fast": 1.0}))
    assert ranks.is_empty(), "nothing that is worth a line of the log"
    metrics.observe(ranks.data)
    assert in_use() == dict.fromkeys(MODES, 0) | {"fast": 2}
    change = SplitZipStats({"codec_fast": -1.0, "codec_max": 1.0, "codec_switches": 1.0})
    assert change.reduce() == {"codec_switches": 1.0}
    metrics.observe(change.data)
    assert in_use() == dict.fromkeys(MODES, 0) | {"fast": 1, "max": 1}
    switches = "vllm:splitzip_codec_switches_total"
    assert registry.get_sample_value(switches, {"model": "m", "engine": "0"}) == 1


def test_a_slow_link_on_the_side_that_loads_is_heard_of(tmp_path, caplog):
    """The store is beside the engine that stores: only the other sees what the link is like."""
    caplog.set_level("INFO")
    server = redis_server(tmp_path)
    link = SlowLink(server.port, 20e6)
    clock = [1.7e9]
    near, far = (f"redis://127.0.0.1:{port}" for port in (server.port, link.port))
    try:
        with (
            rank({"lmcache.remote_url": near}, now=lambda: clock[0]) as first,
            rank({"lmcache.remote_url": far}, now=lambda: clock[0]) as last,
        ):
            for turn in range(6):
                there_and_back([first, last], [turn])
                clock[0] += PERIOD_S
            assert first.auto.get_link is None, "nothing was loaded here"
            assert first.auto.mode in ("dense", "max"), changes(caplog)
    finally:
        link.close()
        server.kill()


def test_notes_of_links(tmp_path):
    clock = [1000 * PERIOD_S]
    with opened({"lmcache.remote_url": f"fs://localhost:0{tmp_path}"}) as store:
        one, other = (LinkReports(store, note_key, lambda: clock[0]) for _ in range(2))
        assert other.latest() is None
        one.publish(Link(0.5, 1e6))
        one.publish(Link(0.5, 2e6))  # passed over: one in a period
        assert other.latest() is None, "asks the store seldom"
        clock[0] += 5 * PERIOD_S
        assert other.latest() == Link(0.5, 1e6), "requests may be rare"
        for path in tmp_path.glob("*.data"):
            path.write_bytes(path.read_bytes()[:-1])
        clock[0] += PERIOD_S / 2
        assert other.latest() == Link(0.5, 1e6), "a note that is damaged changes nothing"
        one.publish(Link(0.25, 3e6))
        assert len(list(tmp_path.glob("*.data"))) == 1, "the note before is gone"
        clock[0] += PERIOD_S / 2
        assert other.latest() == Link(0.25, 3e6)
        clock[0] += FRESH_S
        assert other.latest() is None, "too old to tell"


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x00", [1], [1.0, 0.0], [-1.0, 1.0], {}, 3])
def test_a_note_of_somebody_elses_is_none(data, tmp_path):
    data = data if isinstance(data, bytes) else msgpack.packb(data)
    with opened({"lmcache.remote_url": f"fs://localhost:0{tmp_path}"}) as store:
        reports = LinkReports(store, note_key, lambda: 0.0)
        if data:
            store.put(reports._key(0), [data], len(data), 5.0)
        assert reports.latest() is None


def test_what_no_mode_codes_stays_raw(caplog):
    """Packed caches whose bytes no mode takes apart leave nothing to choose: which is said once."""
    caplog.set_level("INFO")
    counters = Counters()
    auto = AutoCodec({"raw": Speed(1e9, 1e9)}, {}, 1 << 20, 0.0, counters, is_host=True)
    for _ in range(50):
        assert auto.next_step(1, 4) == ("raw", None, "raw")
        auto.puts.enter()
        auto.puts.leave(1 << 20)
    assert counters.take()["codec_switches"] == 0
    assert caplog.text.count("goes on to store KV cache as 'raw'") == 1


def changes(caplog):
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "SplitZip now stores" in message]
