"""The scheduler half on the calls that vLLM's scheduler makes, the awkward ones included.

vLLM's requests and scheduler output are stand-ins here: they only carry what the half reads. The
real scheduler drives it in test_two_processes.py.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from vllm_splitzip.connector.geometry import Geometry, Part
from vllm_splitzip.connector.hits import NO_HIT, Hit
from vllm_splitzip.connector.messages import NOT_WANTED
from vllm_splitzip.connector.scheduler import SchedulerHalf

UNIT = 32
CHUNK = 4
FULL = Geometry(UNIT, UNIT, CHUNK, (1,), (Part(0, None, (0,)),))
HYBRID = Geometry(UNIT, UNIT, CHUNK, (1, 1), (Part(0, None, (0,)), Part(1, 100, (1,))))


@dataclass
class FakeRequest:
    request_id: str
    num_prompt_tokens: int
    num_tokens: int = 0
    num_computed_tokens: int = 0
    block_hashes: list = field(default_factory=list)
    kv_transfer_params: dict | None = None

    def __post_init__(self):
        self.grow(self.num_tokens or self.num_prompt_tokens)

    def grow(self, tokens):
        self.num_tokens = tokens
        self.block_hashes = [bytes([i]) * 32 for i in range(tokens // UNIT)]


class FakeLookup:
    """Answers with `hit`; None means that the workers have not answered yet."""

    def __init__(self):
        self.hit = NO_HIT
        self.store_health = "up"
        self.questions = []

    def ask(self, request_id, hashes, limit):
        self.questions.append((request_id, len(hashes), limit))
        return self.hit

    def forget(self, request_id):
        pass


class Engine:
    """Drives a half as vLLM does. Block i of a request has id 100 + i, in every group."""

    def __init__(self, geometry=FULL, **roles):
        self.geometry = geometry
        self.lookup = FakeLookup()
        roles = {"loads": True, "saves": True, "wait_s": 30.0, **roles}
        self.half = SchedulerHalf(geometry, self.lookup, **roles)

    def tables(self, request):
        blocks = list(range(100, 100 + -(-request.num_tokens // UNIT)))
        return tuple(list(blocks) for _ in self.geometry.group_blocks)

    def alloc(self, request, external, tables=None):
        tables = tables or self.tables(request)
        self.half.after_alloc(request, SimpleNamespace(get_block_ids=lambda: tables), external)

    def admit(self, request):
        """Look-up and allocation of a request that vLLM has nothing of."""
        matched, in_background = self.half.matched_tokens(request, 0)
        assert in_background == (matched > 0)
        self.alloc(request, matched)
        if matched:
            request.num_computed_tokens = matched
        return matched

    def step(self, scheduled, tables=None):
        """One scheduler step. `scheduled`: {request: tokens}; computed when it is over."""
        by_id = {request.request_id: request for request in scheduled}
        state = SimpleNamespace(
            get_block_ids=lambda request_id: tables or self.tables(by_id[request_id])
        )
        output = SimpleNamespace(
            num_scheduled_tokens={r.request_id: n for r, n in scheduled.items()},
            kv_connector_block_state=state,
        )
        step = self.half.build_step(output)
        for request, tokens in scheduled.items():
            request.num_computed_tokens += tokens
        return step


FakeRequest.__hash__ = object.__hash__


def ends(step):
    """(last unit + 1, units) of each saved frame."""
    return [(save.key[0] + 1, save.units) for save in step.saves]


def test_frames_are_saved_as_their_last_block_completes():
    engine, request = Engine(), FakeRequest("a", 400)
    assert engine.admit(request) == 0
    assert ends(engine.step({request: 100})) == []
    assert ends(engine.step({request: 100})) == [(4, 4)]
    assert ends(engine.step({request: 199})) == [(8, 4), (12, 4)]
    # The prompt is complete, but 400 tokens are 12 whole units: no tail.
    assert ends(engine.step({request: 1})) == []


def test_the_prompts_tail_is_saved_once():
    engine, request = Engine(), FakeRequest("a", 200)
    engine.admit(request)
    assert ends(engine.step({request: 200})) == [(4, 4), (6, 2)]
    request.grow(201)
    assert ends(engine.step({request: 1})) == []


def test_generated_tokens_complete_frames_too():
    engine, request = Engine(), FakeRequest("a", 200)
    engine.admit(request)
    engine.step({request: 200})
    saved = []
    for tokens in range(201, 300):
        request.grow(tokens)
        saved += ends(engine.step({request: 1}))
    assert saved == [(8, 4)]


def test_tokens_without_a_hash_are_not_saved():
    """Async scheduling and draft tokens let the count run ahead of what is known."""
    engine, request = Engine(), FakeRequest("a", 120)
    engine.admit(request)
    assert ends(engine.step({request: 140})) == [(3, 3)]


def test_a_decode_step_with_nothing_to_do_is_empty():
    engine, request = Engine(), FakeRequest("a", 200)
    engine.admit(request)
    engine.step({request: 200})
    request.grow(201)
    step = engine.step({request: 1})
    assert step.saves == []
    assert step.loads == []


def test_a_hit_becomes_one_job_with_a_table_per_frame():
    engine, request = Engine(), FakeRequest("a", 300)
    engine.lookup.hit = Hit(9, 9)
    assert engine.admit(request) == 9 * UNIT
    assert engine.lookup.questions == [("a", 9, 9)]
    step = engine.step({})
    (job,) = step.loads
    assert [(frame.key[0] + 1, frame.units) for frame in job.frames] == [(4, 4), (8, 4), (9, 1)]
    assert [frame.tables[0] for frame in job.frames] == [
        [100, 101, 102, 103],
        [104, 105, 106, 107],
        [108],
    ]
    assert engine.step({}).loads == []


def test_what_was_loaded_is_not_saved_again():
    engine, request = Engine(), FakeRequest("a", 300)
    engine.lookup.hit = Hit(9, 9)
    engine.admit(request)
    engine.step({})
    engine.alloc(request, 0)
    assert ends(engine.step({request: 300 - 9 * UNIT})) == []


def test_the_last_token_is_left_to_compute():
    engine, request = Engine(), FakeRequest("a", 8 * UNIT)
    engine.lookup.hit = Hit(7, 8)
    assert engine.admit(request) == 7 * UNIT
    assert engine.lookup.questions == [("a", 8, 7)]
    (job,) = engine.step({}).loads
    assert job.frames[-1].tables[0] == [104, 105, 106, NOT_WANTED]


def test_blocks_of_vllms_own_prefix_cache_are_not_loaded_over():
    engine, request = Engine(), FakeRequest("a", 300)
    engine.lookup.hit = Hit(9, 9)
    assert engine.half.matched_tokens(request, 5 * UNIT) == (4 * UNIT, True)
    engine.alloc(request, 4 * UNIT)
    (job,) = engine.step({}).loads
    assert [frame.tables[0] for frame in job.frames] == [[NOT_WANTED, 105, 106, 107], [108]]


def test_less_than_was_offered_may_be_taken():
    engine, request = Engine(), FakeRequest("a", 300)
    engine.lookup.hit = Hit(9, 9)
    engine.half.matched_tokens(request, 0)
    engine.alloc(request, 6 * UNIT)
    (job,) = engine.step({}).loads
    assert [frame.tables[0] for frame in job.frames] == [
        [100, 101, 102, 103],
        [104, 105, NOT_WANTED, NOT_WANTED],
    ]


def test_an_offer_that_another_connector_won_is_forgotten():
    engine, request = Engine(), FakeRequest("a", 300)
    engine.lookup.hit = Hit(9, 9)
    engine.half.matched_tokens(request, 0)
    engine.alloc(request, 0)
    assert engine.step({}).loads == []


def test_asking_again_before_allocation_changes_nothing():
    engine, request = Engine(), FakeRequest("a", 300)
    engine.lookup.hit = None
    assert engine.half.matched_tokens(request, 0) == (None, False)
    engine.lookup.hit = Hit(9, 9)
    for _ in range(3):
        assert engine.half.matched_tokens(request, 0) == (9 * UNIT, True)
    assert len(engine.lookup.questions) == 2


def test_only_the_window_is_loaded_where_there_is_one():
    engine, request = Engine(HYBRID), FakeRequest("a", 300)
    engine.lookup.hit = Hit(9, 9)
    engine.half.matched_tokens(request, 0)
    blocks = list(range(100, 110))
    windowed = [0, 0, 0, 0, 0, *blocks[5:]]
    engine.alloc(request, 9 * UNIT, (blocks, windowed))
    (job,) = engine.step({}).loads
    # Token 288 sees the 99 tokens before it, 189 to 287: units 5 to 8.
    assert [frame.tables[1] for frame in job.frames] == [
        None,
        [NOT_WANTED, 105, 106, 107],
        [108],
    ]


def test_blocks_that_left_the_window_are_not_saved():
    engine, request = Engine(HYBRID), FakeRequest("a", 300)
    engine.admit(request)
    blocks = list(range(100, 110))
    step = engine.step({request: 300}, (blocks, [0, 0, 0, 0, 0, *blocks[5:]]))
    assert [[table is not None for table in save.tables] for save in step.saves] == [
        [True, False],
        [True, False],
        [True, True],
    ]


@pytest.mark.parametrize("how", ["a failed request", "a failed block"])
def test_a_load_that_failed_is_computed_once_and_stored_anew(how):
    engine, request = Engine(), FakeRequest("a", 300)
    engine.lookup.hit = Hit(9, 9)
    engine.admit(request)
    engine.step({})
    if how == "a failed request":  # vLLM threw everything away and asks again.
        request.num_computed_tokens = 0
        assert engine.half.matched_tokens(request, 0) == (0, False)
    else:  # vLLM kept what came before the failed block.
        request.num_computed_tokens = 4 * UNIT
    engine.alloc(request, 0)
    step = engine.step({request: 300 - request.num_computed_tokens})
    assert ends(step) == [(4, 4), (8, 4), (9, 1)]


def test_a_preempted_request_may_load_what_it_stored():
    engine, request = Engine(), FakeRequest("a", 300)
    engine.admit(request)
    engine.step({request: 300})
    request.num_computed_tokens = 0
    engine.lookup.hit = Hit(9, 9)
    assert engine.admit(request) == 9 * UNIT
    (job,) = engine.step({}).loads
    assert len(job.frames) == 3


def test_what_the_store_lost_is_stored_again():
    engine = Engine()
    first, second = FakeRequest("a", 300), FakeRequest("b", 300)
    engine.admit(first)
    engine.step({first: 300})
    engine.lookup.hit = Hit(4, 4)
    engine.admit(second)
    assert ends(engine.step({second: 300 - 4 * UNIT})) == [(8, 4), (9, 1)]


def test_two_requests_in_one_step_save_a_shared_prefix_once():
    engine = Engine()
    first, second = FakeRequest("a", 300), FakeRequest("b", 300)
    engine.admit(first)
    engine.admit(second)
    assert ends(engine.step({first: 300, second: 300})) == [(4, 4), (8, 4), (9, 1)]


def test_a_producer_loads_nothing_and_stores_what_is_missing():
    engine, request = Engine(loads=False), FakeRequest("a", 300)
    engine.lookup.hit = Hit(4, 4)
    assert engine.admit(request) == 0
    assert ends(engine.step({request: 300})) == [(8, 4), (9, 1)]


def test_a_consumer_saves_nothing():
    engine, request = Engine(saves=False), FakeRequest("a", 300)
    engine.admit(request)
    assert engine.step({request: 300}).saves == []


def test_an_id_used_again_starts_afresh():
    engine, first = Engine(), FakeRequest("a", 300)
    engine.admit(first)
    engine.step({first: 200})
    engine.half.request_finished(first)
    second = FakeRequest("a", 500)
    engine.lookup.hit = Hit(4, 4)
    assert engine.admit(second) == 4 * UNIT


def test_a_one_token_prompt_asks_nobody():
    """A rejected request is cleaned up by vLLM with a request of one token."""
    engine, request = Engine(), FakeRequest("a", 1)
    assert engine.admit(request) == 0
    assert engine.lookup.questions == []
    assert engine.step({request: 1}).saves == []


PREFILLED_ELSEWHERE = {"do_remote_prefill": True, "do_remote_decode": False}


def test_the_decode_side_waits_for_frames_that_are_on_their_way(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    engine = Engine()
    request = FakeRequest("a", 300, kv_transfer_params=PREFILLED_ELSEWHERE)
    for hit in (None, NO_HIT, Hit(4, 4), Hit(8, 8)):
        engine.lookup.hit = hit
        assert engine.half.matched_tokens(request, 0) == (None, False)
        clock[0] += 0.02
    engine.lookup.hit = Hit(9, 9)
    assert engine.half.matched_tokens(request, 0) == (9 * UNIT, True)


def test_the_decode_side_does_not_ask_at_every_step(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    engine = Engine()
    request = FakeRequest("a", 300, kv_transfer_params=PREFILLED_ELSEWHERE)
    for _ in range(50):
        assert engine.half.matched_tokens(request, 0) == (None, False)
    assert len(engine.lookup.questions) == 1


def test_the_decode_side_makes_do_with_what_is_there_in_the_end(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    engine = Engine(wait_s=2.0)
    request = FakeRequest("a", 300, kv_transfer_params=PREFILLED_ELSEWHERE)
    engine.lookup.hit = Hit(4, 4)
    assert engine.half.matched_tokens(request, 0) == (None, False)
    clock[0] += 2.1
    assert engine.half.matched_tokens(request, 0) == (4 * UNIT, True)


def test_the_decode_side_does_not_wait_long_for_a_store_that_is_down(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    engine = Engine(wait_s=30.0)
    request = FakeRequest("a", 300, kv_transfer_params=PREFILLED_ELSEWHERE)
    engine.lookup.store_health = "down"
    assert engine.half.matched_tokens(request, 0) == (None, False)
    clock[0] += 2.1
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_nothing_waits_without_parameters():
    engine, request = Engine(), FakeRequest("a", 300)
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_the_prefill_side_answers_what_the_decode_side_is_called_with():
    engine = Engine(engine_id="prefill-1")
    request = FakeRequest(
        "a", 300, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False}
    )
    engine.admit(request)
    answer = engine.half.request_finished(request)
    assert answer["do_remote_prefill"] is True
    assert answer["do_remote_decode"] is False
    assert answer["remote_engine_id"] == "prefill-1"
    assert answer["remote_num_tokens"] == 300


@pytest.mark.parametrize(("health", "saves"), [("read-only", True), ("down", True), ("up", False)])
def test_frames_that_are_not_stored_are_not_announced(health, saves):
    engine = Engine(saves=saves)
    engine.lookup.store_health = health
    request = FakeRequest("a", 300, kv_transfer_params={"do_remote_decode": True})
    engine.admit(request)
    answer = engine.half.request_finished(request)
    assert answer["do_remote_prefill"] is False
    assert answer["remote_num_tokens"] == 300


@pytest.mark.parametrize("parameters", [{}, {"do_remote_prefill": True}, {"unknown": 1}])
def test_a_one_token_request_with_any_parameters_is_served(parameters):
    engine, request = Engine(), FakeRequest("a", 1, kv_transfer_params=parameters)
    assert engine.admit(request) == 0
    assert engine.half.request_finished(request) is None
