"""The rule that finds the longest hit, against a search through all possibilities."""

import random

import pytest

from vllm_splitzip.connector.geometry import Geometry, Part
from vllm_splitzip.connector.hits import NO_HIT, SCAN_CHUNKS, Hit, Run, longest_hit

UNIT = 32

GEOMETRIES = {
    "full": Geometry(UNIT, UNIT, 4, (1,), (Part(0, None, (0,)),)),
    "full and window": Geometry(UNIT, UNIT, 4, (1, 1), (Part(0, None, (0,)), Part(1, 100, (1,)))),
    "window alone": Geometry(UNIT, UNIT, 4, (1,), (Part(0, 300, (0,)),)),
    "two windows": Geometry(
        UNIT, UNIT, 3, (1, 1, 1), (Part(0, None, (0,)), Part(1, 33, (1,)), Part(2, 200, (2,)))
    ),
    "one unit a chunk": Geometry(UNIT, UNIT, 1, (1,), (Part(0, None, (0,)),)),
}


def units_needed(geometry, part, units):
    """Units whose blocks attention of the next token reads, token by token."""
    first_token = 0 if part.window is None else max(0, units * UNIT - part.window + 1)
    return {token // UNIT for token in range(first_token, units * UNIT)}


def usable(geometry, stored, units, end):
    """Whether frames that are stored cover all that a hit of `units` needs, `end` the last."""
    chunk = geometry.chunk_units
    for part in geometry.parts:
        for unit in units_needed(geometry, part, units):
            start = unit // chunk * chunk
            last = end if start == (end - 1) // chunk * chunk else start + chunk
            if Run(part.index, last) not in stored:
                return False
    return True


def whole_chunks(geometry, stored, known):
    """Units up to the first whole chunk that is not stored for all full attention."""
    chunk = geometry.chunk_units
    full = [part.index for part in geometry.parts if part.window is None]
    end = 0
    while end + chunk <= known and all(Run(part, end + chunk) in stored for part in full):
        end += chunk
    return end


def all_hits(geometry, stored, known, limit):
    """Every hit that ends with a whole chunk, or in the first one that is not whole."""
    chunk = geometry.chunk_units
    whole = whole_chunks(geometry, stored, known)
    for end in range(1, known + 1):
        if end % chunk and not whole < end < whole + chunk:
            continue
        units = min(end, limit)
        if units > (end - 1) // geometry.chunk_units * geometry.chunk_units and usable(
            geometry, stored, units, end
        ):
            yield Hit(units, end)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_the_hit_is_usable_and_no_longer_one_is_within_reach(geometry):
    rng = random.Random(7)
    found = 0
    for _ in range(3000):
        known = rng.randrange(0, 30)
        limit = rng.choice([known, known - 1])
        density = rng.choice([0.5, 0.9, 1.0])
        stored = {
            Run(part.index, end)
            for part in geometry.parts
            for end in range(1, known + 1)
            if rng.random() < (density if end % geometry.chunk_units == 0 else 0.3)
        }

        def contains(runs, stored=stored):
            return [run in stored for run in runs]

        hit = longest_hit(geometry, known, limit, contains)
        possible = set(all_hits(geometry, stored, known, limit))
        if hit != NO_HIT:
            assert hit in possible
            found += 1
        full = [part for part in geometry.parts if part.window is None]
        if full:
            # Beyond the first chunk that full attention lacks, nothing can be used.
            assert hit.units == max((h.units for h in possible), default=0)
    assert found > 500


def test_nothing_is_asked_when_nothing_can_be_used():
    def contains(runs):
        raise AssertionError(runs)

    geometry = GEOMETRIES["full"]
    assert longest_hit(geometry, 0, 0, contains) == NO_HIT
    assert longest_hit(geometry, 1, 0, contains) == NO_HIT


def test_a_long_prompt_is_asked_for_in_batches():
    geometry = GEOMETRIES["full"]
    calls = []

    def contains(runs):
        calls.append(len(runs))
        return [run.end <= 4 * 20 for run in runs]

    assert longest_hit(geometry, 4 * 1000, 4 * 1000, contains) == Hit(80, 80)
    assert calls[:2] == [SCAN_CHUNKS, SCAN_CHUNKS]
    assert len(calls) <= 6
