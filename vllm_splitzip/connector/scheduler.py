"""The scheduler half: which frames a request can load, and which it should store, step by step.

It holds no KV cache and no store. What is stored it learns from the workers' `LookupServer`; what
is to be done it tells them in a `Step`.
"""

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .geometry import Geometry
from .handover import is_prefill_for_another, is_prefilled_elsewhere, parameters_for_decode
from .hits import NO_HIT, Hit
from .lookup import LookupClient
from .messages import NOT_WANTED, LoadFrame, LoadJob, SaveFrame, Step
from .trace import OFF, Trace

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

NULL_BLOCK = 0
"""vLLM's id for a block outside the sliding window."""

REMEMBERED_SAVES = 1 << 16

ASK_AGAIN_S = 0.01
"""Seconds between two looks for frames that are on their way."""

DOWN_S = 2.0
"""Seconds to go on waiting for them when the store does not answer."""


class _Offer(NamedTuple):
    """A hit offered to vLLM, of which the first `computed` units are in its own cache."""

    hit: Hit
    computed: int


@dataclass(slots=True)
class _Tracked:
    """A request on its way through the scheduler.

    Attributes
    ----------
    request
        vLLM's own object; its block hashes and token counts are read, never kept.
    hit
        What the store holds of it; None while that is not known.
    offer
        What was offered to vLLM and not answered yet.
    loading
        Units that a load job will have filled when it ends well; 0 if there is none.
    saved
        Units up to which frames are stored or have been told to the workers to be stored.
    load_failed
        A load of this request failed once. It is not tried again.
    since
        When it came, or its load was planned; for the trace.
    wait_until, ask_again_at
        For a request that was prefilled elsewhere: when to make do with what is there, and when
        to look again. Seconds of the monotonic clock.
    """

    request: "Request"
    hit: Hit | None = None
    offer: _Offer | None = None
    loading: int = 0
    saved: int = 0
    tail_saved: bool = False
    load_failed: bool = False
    since: float = field(default_factory=time.monotonic)
    wait_until: float | None = None
    ask_again_at: float = 0.0


class SchedulerHalf:
    """Decides loads and saves. One per engine, called from its scheduler only.

    Parameters
    ----------
    loads, saves
        What this engine's role lets it do.
    wait_s
        Seconds that a request prefilled elsewhere waits for its frames.
    engine_id
        vLLM's name for this engine, which a prefill passes on.
    """

    def __init__(
        self,
        geometry: Geometry,
        lookup: LookupClient,
        *,
        loads: bool,
        saves: bool,
        wait_s: float,
        engine_id: str | None = None,
        trace: Trace = OFF,
    ) -> None:
        self._trace = trace
        self._geometry = geometry
        self._lookup = lookup
        self._wait_s = wait_s
        self._engine_id = engine_id
        self._loads = loads
        self._saves = saves
        self._tracked: dict[str, _Tracked] = {}
        self._jobs: list[LoadJob] = []
        self._recently_saved: OrderedDict[bytes, None] = OrderedDict()
        self._reported = {"requests_open": 0, "lookups_open": 0}

    # What vLLM's scheduler asks while it admits a request.

    def matched_tokens(self, request: "Request", computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond `computed_tokens`, whether in the background).

        (None, False) while the workers have not answered yet; vLLM asks again.
        """
        tracked = self._track(request)
        if tracked.loading:
            # vLLM asks again after a load only when it threw all of it away.
            self._forget_failed_load(tracked)
        if tracked.load_failed:
            return 0, False
        if tracked.hit is None:
            hit = None if self._is_resting(tracked) else self._ask_workers(request)
            if hit is None or self._is_worth_waiting(tracked, hit):
                return None, False
            tracked.hit = hit
            self._note_stored(tracked, hit)
            self._trace.between("wait", tracked.since, request=request.request_id, hit=hit.units)
        unit = self._geometry.unit_tokens
        matched = tracked.hit.units * unit - computed_tokens
        if matched <= 0 or not self._loads:
            return 0, False
        tracked.offer = _Offer(tracked.hit, computed_tokens // unit)
        return matched, True

    def after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int
    ) -> None:
        """vLLM allocated blocks. What it says it will load counts, not what was offered."""
        tracked = self._track(request)
        offer, tracked.offer = tracked.offer, None
        tracked.hit = None  # After a preemption the store is asked anew.
        if external_tokens > 0 and offer is not None:
            self._plan_load(tracked, offer, blocks.get_block_ids(), external_tokens)
            tracked.since = time.monotonic()
        elif tracked.loading:
            arrived = request.num_computed_tokens + 1 >= tracked.loading * (
                self._geometry.unit_tokens
            )
            if arrived:
                tracked.loading = 0
                self._trace.between("load", tracked.since, request=request.request_id)
            else:
                self._forget_failed_load(tracked)

    def request_finished(self, request: "Request") -> dict[str, Any] | None:
        """The request left the scheduler. Its blocks may be freed: saves have read them already."""
        self._tracked.pop(request.request_id, None)
        self._lookup.forget(request.request_id)
        if is_prefill_for_another(request.kv_transfer_params):
            return parameters_for_decode(
                request.request_id,
                request.num_prompt_tokens,
                self._engine_id,
                are_stored=self._saves and self._lookup.store_health == "up",
            )
        return None

    # What vLLM's scheduler hands to the workers.

    def build_step(self, output: "SchedulerOutput") -> Step:
        """Loads planned since the last step, and saves of all frames that this step completes."""
        step = Step(loads=self._jobs)
        self._jobs = []
        if self._saves:
            for request_id, scheduled in output.num_scheduled_tokens.items():
                tracked = self._tracked.get(request_id)
                if tracked is not None:
                    self._plan_saves(tracked, scheduled, output, step)
        return step

    def take_counts(self) -> dict[str, float] | None:
        """Changes of what is held on to since the last call (`counters.GAUGES`), if there are."""
        held = {"requests_open": len(self._tracked), "lookups_open": self._lookup.open_questions}
        changes = {name: float(now - self._reported[name]) for name, now in held.items()}
        self._reported = held
        return changes if any(changes.values()) else None

    def close(self) -> None:
        """Close the channel to the workers."""
        self._lookup.close()

    def _track(self, request: "Request") -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            tracked = self._tracked[request.request_id] = _Tracked(request)
        return tracked

    def _ask_workers(self, request: "Request") -> Hit | None:
        unit = self._geometry.unit_tokens
        known = min(request.num_tokens // unit, self._hashed_units(request))
        # The last token is always computed, since its output is what is wanted.
        limit = (request.num_tokens - 1) // unit
        if limit <= 0:
            return NO_HIT
        hashes = [self._key(request, end) for end in range(1, known + 1)]
        return self._lookup.ask(request.request_id, hashes, limit)

    def _is_resting(self, tracked: _Tracked) -> bool:
        return time.monotonic() < tracked.ask_again_at

    def _is_worth_waiting(self, tracked: _Tracked, hit: Hit) -> bool:
        """Whether more frames than `hit` are on their way from another server, in time."""
        request = tracked.request
        wanted = (request.num_prompt_tokens - 1) // self._geometry.unit_tokens
        if not self._loads or hit.units >= wanted:
            return False
        if not is_prefilled_elsewhere(request.kv_transfer_params):
            return False
        now = time.monotonic()
        if tracked.wait_until is None:
            tracked.wait_until = now + self._wait_s
        if self._lookup.store_health == "down":
            tracked.wait_until = min(tracked.wait_until, now + DOWN_S)
        tracked.ask_again_at = now + ASK_AGAIN_S
        return now < tracked.wait_until

    def _plan_load(
        self,
        tracked: _Tracked,
        offer: _Offer,
        block_ids: tuple[list[int], ...],
        external_tokens: int,
    ) -> None:
        geometry = self._geometry
        request = tracked.request
        last = min(offer.computed + external_tokens // geometry.unit_tokens, offer.hit.units)
        first_wanted = [0] * len(block_ids)
        for part in geometry.parts:
            first = max(offer.computed, geometry.first_needed(part, last))
            for group in part.groups:
                first_wanted[group] = first
        frames = []
        for start in range(geometry.chunk_start(offer.computed), last, geometry.chunk_units):
            end = min(start + geometry.chunk_units, offer.hit.end)
            tables = tuple(
                self._load_table(ids, start, end, first_wanted[group], last, group)
                for group, ids in enumerate(block_ids)
            )
            frames.append(LoadFrame(self._key(request, end), end - start, tables))
        tracked.loading = last
        self._jobs.append(LoadJob(request.request_id, frames))

    def _load_table(
        self, ids: list[int], start: int, end: int, first: int, last: int, group: int
    ) -> list[int] | None:
        """Block ids of units [start, end), of which those in [first, last) are wanted."""
        per_unit = self._geometry.group_blocks[group]
        table = [
            ids[block] if first * per_unit <= block < last * per_unit else NOT_WANTED
            for block in range(start * per_unit, end * per_unit)
        ]
        table = [NOT_WANTED if block == NULL_BLOCK else block for block in table]
        return None if all(block == NOT_WANTED for block in table) else table

    def _plan_saves(
        self, tracked: _Tracked, scheduled: int, output: "SchedulerOutput", step: Step
    ) -> None:
        geometry = self._geometry
        request = tracked.request
        # Draft tokens that have not been accepted have no hash yet, so hashes are the limit.
        tokens = request.num_computed_tokens + scheduled
        complete = min(tokens // geometry.unit_tokens, self._hashed_units(request))
        chunk = geometry.chunk_units
        prompt_done = tokens >= request.num_prompt_tokens and not tracked.tail_saved
        if complete < tracked.saved + chunk and not prompt_done:
            return

        ends = list(range(tracked.saved + chunk, complete + 1, chunk))
        if ends:
            tracked.saved = ends[-1]
        if prompt_done:
            tracked.tail_saved = True
            prompt_units = min(request.num_prompt_tokens // geometry.unit_tokens, complete)
            if prompt_units > tracked.saved:
                ends.append(prompt_units)
        if not ends:
            return
        state = output.kv_connector_block_state
        block_ids = state.get_block_ids(request.request_id) if state is not None else None
        if block_ids is None:
            logger.debug("no block table for request %s, nothing saved", request.request_id)
            return
        for end in ends:
            key = self._key(request, end)
            if self._is_new(key):
                start = geometry.chunk_start(end - 1)
                tables = tuple(
                    self._save_table(ids, start, end, group) for group, ids in enumerate(block_ids)
                )
                if any(table is not None for table in tables):
                    step.saves.append(SaveFrame(key, end - start, tables))

    def _save_table(self, ids: list[int], start: int, end: int, group: int) -> list[int] | None:
        per_unit = self._geometry.group_blocks[group]
        table = ids[start * per_unit : end * per_unit]
        if len(table) < (end - start) * per_unit or NULL_BLOCK in table:
            return None
        return table

    def _note_stored(self, tracked: _Tracked, hit: Hit) -> None:
        """Nothing of a hit need be stored again; what is beyond it must be, if it once was."""
        tracked.saved = max(tracked.saved, self._geometry.chunk_start(hit.end))
        for end in range(hit.end + 1, self._hashed_units(tracked.request) + 1):
            self._recently_saved.pop(self._key(tracked.request, end), None)
        if hit.end:
            self._is_new(self._key(tracked.request, hit.end))

    def _is_new(self, key: bytes) -> bool:
        """Whether this engine has not told its workers to store `key` lately."""
        if key in self._recently_saved:
            return False
        self._recently_saved[key] = None
        if len(self._recently_saved) > REMEMBERED_SAVES:
            self._recently_saved.popitem(last=False)
        return True

    def _forget_failed_load(self, tracked: _Tracked) -> None:
        """A load came to nothing: compute instead, and store what was not there after all."""
        tracked.loading = 0
        tracked.load_failed = True
        tracked.saved = 0
        for end in range(1, self._hashed_units(tracked.request) + 1):
            self._recently_saved.pop(self._key(tracked.request, end), None)

    def _hashed_units(self, request: "Request") -> int:
        hashes_per_unit = self._geometry.unit_tokens // self._geometry.hash_tokens
        return len(request.block_hashes) // hashes_per_unit

    def _key(self, request: "Request", end: int) -> bytes:
        """The hash of the run that ends with unit `end` - 1."""
        hashes_per_unit = self._geometry.unit_tokens // self._geometry.hash_tokens
        return bytes(request.block_hashes[end * hashes_per_unit - 1])
