"""Mode `fast` on a CPU: the compiled loops. `reference/fast.py` says what the bytes mean.

All arguments are integers (addresses, sizes, strides), see `vector.py` for why. Nothing is
checked here: `fast.py` checks everything before it calls, and holds the arrays alive.
"""

# numba and llvmlite are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from ..coded import CHUNK
from .compiling import compiled
from .vector import (
    LANES,
    fence,
    join,
    join_nibbles,
    load,
    pointer8,
    pointer16,
    pointer64,
    prefetch,
    scratch,
    split,
    split_nibbles,
    store,
    stream,
    table_codes,
    table_exponents,
    trailing_zeros,
    window_codes,
    window_exponents,
)

HALF = CHUNK // 2
WORD_BYTES = 2 * CHUNK
AHEAD = 6
"""How many chunks ahead memory is asked for; the processor's own guess ends with each block."""

MASK_BYTES = CHUNK // 8


@compiled
def copy_bytes(source, target, size):
    """Copy any number of bytes."""
    read, write = pointer8(source), pointer8(target)
    for i in range(size):
        write[i] = read[i]


@compiled
def gather(pages, stride, table, row, begin, count, words):
    """Copy `count` words from element `begin` of the run to `words`."""
    ids, target = pointer64(table), pointer16(words)
    done = 0
    while done < count:
        at = begin + done
        index, column = at // row, at % row
        piece = min(count - done, row - column)
        source = pointer16(pages + ids[index] * stride + 2 * column)
        for i in range(piece):
            target[done + i] = source[i]
        done += piece


@compiled
def scatter(pages, stride, table, row, begin, count, words):
    """Copy `count` words from `words` to element `begin` of the run, but for unwanted blocks."""
    ids, source = pointer64(table), pointer16(words)
    done = 0
    while done < count:
        at = begin + done
        index, column = at // row, at % row
        piece = min(count - done, row - column)
        if ids[index] >= 0:
            target = pointer16(pages + ids[index] * stride + 2 * column)
            for i in range(piece):
                target[i] = source[done + i]
        done += piece


@compiled
def put(address, value, streaming):
    """64 bytes into the cache, or past it."""
    if streaming:
        stream(address, value)
    else:
        store(address, value)


@compiled
def encode_words(words, codes, rest, masks, book, window, ahead, streaming):
    """Code a full chunk; bit i of masks[j] says that element 64 j + i escapes. Any escapes?

    `ahead` is the address of a chunk that will be coded soon.
    """
    entries, escaped = pointer8(book), pointer64(masks)
    first, base = entries[0], entries[1]
    found = 0
    for i in range(0, HALF, LANES):
        for line in (2 * i, 2 * i + LANES, 2 * (i + HALF), 2 * (i + HALF) + LANES):
            prefetch(ahead + line)
        low_exponents, low_rest = split(words + 2 * i)
        high_exponents, high_rest = split(words + 2 * (i + HALF))
        if window:
            low, low_bits = window_codes(low_exponents, first, base)
            high, high_bits = window_codes(high_exponents, first, base)
        else:
            low, low_bits = table_codes(low_exponents, book)
            high, high_bits = table_codes(high_exponents, book)
        put(rest + i, low_rest, streaming)
        put(rest + i + HALF, high_rest, streaming)
        put(codes + i, join_nibbles(low, high), streaming)
        escaped[i // LANES] = low_bits
        escaped[(i + HALF) // LANES] = high_bits
        found |= low_bits | high_bits
    return found != 0


@compiled
def decode_exponents(exponents, codes, book, window):
    """The exponents of a full chunk, escapes aside."""
    entries = pointer8(book)
    first, base = entries[0], entries[1]
    for i in range(0, HALF, LANES):
        prefetch(codes + i + AHEAD * HALF)
        low, high = split_nibbles(load(codes + i))
        if window:
            low = window_exponents(low, first, base)
            high = window_exponents(high, first, base)
        else:
            low = table_exponents(low, book)
            high = table_exponents(high, book)
        store(exponents + i, low)
        store(exponents + i + HALF, high)


@compiled
def join_words(words, exponents, rest, streaming):
    """The words of a full chunk."""
    for i in range(0, CHUNK, LANES):
        prefetch(rest + i + AHEAD * CHUNK)
        low, high = join(load(exponents + i), load(rest + i))
        put(words + 2 * i, low, streaming)
        put(words + 2 * i + LANES, high, streaming)


@compiled
def list_escapes(words, masks, positions, exponents, at):
    """Append the chunk's escapes at index `at` of both lists; returns how many."""
    source, escaped = pointer16(words), pointer64(masks)
    position, exponent = pointer16(positions), pointer8(exponents)
    count = 0
    for j in range(CHUNK // LANES):
        bits = escaped[j]
        while bits != 0:
            i = j * LANES + trailing_zeros(bits)
            position[at + count] = i
            exponent[at + count] = (source[i] >> 7) & 0xFF
            count += 1
            bits &= bits - 1
    return count


@compiled
def encode_chunks(
    pages, stride, table, row, elements,
    begin, end, codes, rest, counts, positions, exponents, limit, book, window, streaming,
):  # fmt: skip
    """Code chunks `begin` to `end` of the run, escapes to the front of the two lists.

    Returns the number of escapes, and stops early when it is more than `limit`. The lists have
    room for `limit` + CHUNK.
    """
    ids, number = pointer64(table), pointer16(counts)
    masks, padded = scratch(MASK_BYTES), scratch(WORD_BYTES)
    near_rest = scratch(CHUNK)
    whole_rows = row % CHUNK == 0
    total = 0
    for chunk in range(begin, end):
        element = chunk * CHUNK
        count = min(CHUNK, elements - element)
        soon = min(chunk + AHEAD, end - 1) * CHUNK
        ahead = pages + ids[soon // row] * stride + 2 * (soon % row)
        if whole_rows:
            words = pages + ids[element // row] * stride + 2 * (element % row)
        else:
            words = padded
            gather(pages, stride, table, row, element, count, padded)
            filler, spare = pointer8(book)[0], pointer16(padded)
            for i in range(count, CHUNK):
                spare[i] = filler << 7
        code_target, rest_target = codes + chunk * HALF, rest + element
        if count == CHUNK:
            found = encode_words(
                words, code_target, rest_target, masks, book, window, ahead, streaming
            )
        else:
            found = encode_words(words, code_target, near_rest, masks, book, window, ahead, False)
            copy_bytes(near_rest, rest_target, count)
        escapes = 0
        if found:
            escapes = list_escapes(words, masks, positions, exponents, total)
        number[chunk] = escapes
        total += escapes
        if total > limit:
            break
    if streaming:
        fence()
    return total


@compiled
def fits(counts, positions, number, elements):
    """Whether the counts add up to `number`, and each escape is one of the elements."""
    per_chunk, position = pointer16(counts), pointer16(positions)
    at = 0
    for element in range(0, elements, CHUNK):
        count, size = per_chunk[element // CHUNK], min(CHUNK, elements - element)
        if count > number - at:
            return False
        for k in range(at, at + count):
            if position[k] >= size:
                return False
        at += count
    return at == number


@compiled
def decode_chunks(
    pages, stride, table, row, elements,
    begin, end, codes, rest, counts, positions, exponents, book, window, streaming,
):  # fmt: skip
    """Decode chunks `begin` to `end` of the run; the streams are known to fit."""
    ids, number = pointer64(table), pointer16(counts)
    position, exponent = pointer16(positions), pointer8(exponents)
    near_words, near_rest, near_exponents = scratch(WORD_BYTES), scratch(CHUNK), scratch(CHUNK)
    patched = pointer8(near_exponents)
    whole_rows = row % CHUNK == 0
    escape = 0
    for chunk in range(begin):
        escape += number[chunk]
    for chunk in range(begin, end):
        element = chunk * CHUNK
        count = min(CHUNK, elements - element)
        escapes = number[chunk]
        block = ids[element // row] if whole_rows else 0
        if block >= 0:
            decode_exponents(near_exponents, codes + chunk * HALF, book, window)
            for k in range(escape, escape + escapes):
                patched[position[k]] = exponent[k]
            rest_source = rest + element
            if count < CHUNK:
                copy_bytes(rest_source, near_rest, count)
                rest_source = near_rest
            if whole_rows:
                words = pages + block * stride + 2 * (element % row)
                join_words(words, near_exponents, rest_source, streaming)
            else:
                join_words(near_words, near_exponents, rest_source, False)
                scatter(pages, stride, table, row, element, count, near_words)
        escape += escapes
    if streaming:
        fence()
