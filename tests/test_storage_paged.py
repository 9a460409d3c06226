"""Frames over pages, on a real S3 server: whole or a miss, whatever happens to a page."""

import http.client
import threading
import time

import pytest

from storage_helpers import (
    MIB,
    BlackHole,
    content,
    get,
    idle_within,
    key,
    opened,
    put,
    redis_server,
    s3,
    s3_server,
    wait_for,
)
from vllm_splitzip.errors import SettingError
from vllm_splitzip.storage import open_store
from vllm_splitzip.storage.keys import lmcache_key
from vllm_splitzip.storage.paged import HEADER

PAGE = 16 * 1024
PAYLOAD = PAGE - HEADER.size
# moto looks at who asks, and not at the signature.
SIGNED = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, Signature=none"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = s3_server(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture
def bucket(server):
    """Reads, writes and deletes objects of the bucket: `bucket(method, name, body)`."""

    def call(method: str, name: str = "", body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request(method, f"/{name}", body, {"Authorization": SIGNED})
        with connection.getresponse() as answer:
            return answer.status, answer.read()

    return call


def page_name(number: int, page: int) -> str:
    namespace, rest = lmcache_key(key(number)).to_string().split("@", 1)
    return f"{namespace}.{PAGE // 4096}.{page}@{rest}"


@pytest.fixture
def store(server):
    with opened(s3(server.port, splitzip_page_bytes=PAGE)) as store:
        yield store


def test_pages_are_as_many_as_needed_and_describe_themselves(store, bucket):
    sizes = [1, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, 40 * PAYLOAD]
    for number, size in enumerate(sizes, 100):
        assert put(store, number, content(number, size))
        assert get(store, number) == content(number, size)
        count = -(-size // PAYLOAD)
        for page in range(count):
            status, body = bucket("GET", page_name(number, page))
            assert (status, len(body)) == (200, PAGE)
            magic, found, nbytes, _ = HEADER.unpack_from(body)
            assert (magic, found, nbytes) == (b"SZP1", page, size)
        assert bucket("GET", page_name(number, count))[0] == 404
        used = size - (count - 1) * PAYLOAD
        assert not any(body[HEADER.size + used :])


def test_page_0_is_written_last(store, bucket):
    seen = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append([bucket("HEAD", page_name(200, page))[0] == 200 for page in (0, 1, 7)])

    thread = threading.Thread(target=watch)
    thread.start()
    assert wait_for(lambda: seen)
    assert put(store, 200, content(200, 8 * PAYLOAD))
    assert wait_for(lambda: seen[-1] == [True] * 3)
    stop.set()
    thread.join()
    assert all(rest == [True, True] for first, *rest in seen if first)


@pytest.mark.parametrize(
    "damage",
    ["missing", "short", "long", "zeros", "a bit", "another page", "another object", "old head"],
)
def test_a_page_that_is_not_right_is_a_miss_until_the_frame_is_put_again(store, bucket, damage):
    data = content(1, 3 * PAYLOAD)
    assert put(store, 1, data)
    assert put(store, 2, content(2, 3 * PAYLOAD))
    name = page_name(1, 0 if damage == "old head" else 1)
    body = bucket("GET", name)[1]
    if damage == "missing":
        assert bucket("DELETE", name)[0] == 204
    else:
        flipped = bytearray(body)
        flipped[HEADER.size + 77] ^= 1
        torn = {
            "short": body[:-1],
            "long": body + b"x",
            "zeros": bytes(PAGE),
            "a bit": bytes(flipped),
            "another page": bucket("GET", page_name(1, 2))[1],
            "another object": bucket("GET", page_name(2, 1))[1],
            "old head": bucket("GET", page_name(2, 0))[1],
        }[damage]
        assert bucket("PUT", name, torn)[0] == 200
    assert store.contains([key(1), key(2)], 10.0) == [True, True]
    assert get(store, 1) is None
    assert store.contains([key(1)], 10.0) == [False]
    assert get(store, 2) == content(2, 3 * PAYLOAD)
    assert put(store, 1, data)
    assert get(store, 1) == data
    assert store.health == "up"
    assert idle_within(store)


def test_engines_see_what_another_one_stores_later(store, server):
    # LMCache's connector remembers for ever that an object was not there.
    assert get(store, 300) is None
    assert store.contains([key(300)], 10.0) == [False]
    with opened(s3(server.port, splitzip_page_bytes=PAGE)) as other:
        assert put(other, 300, content(300, 100_000))
    assert store.contains([key(300)], 10.0) == [True]
    assert get(store, 300) == content(300, 100_000)


def test_engines_with_other_pages_do_not_disturb_each_other(store, server):
    with opened(s3(server.port, splitzip_page_bytes=2 * PAGE)) as other:
        assert put(store, 400, content(400, 100_000))
        assert other.contains([key(400)], 10.0) == [False]
        assert put(other, 400, content(401, 100_000))
        assert get(other, 400) == content(401, 100_000)
    assert get(store, 400) == content(400, 100_000)


def test_two_writers_of_one_key_leave_one_object_or_a_miss(store, server):
    # Equal keys name equal KV cache, but frames of two codecs differ.
    candidates = [content(501, 20 * PAYLOAD), content(502, 20 * PAYLOAD)]
    with opened(s3(server.port, splitzip_page_bytes=PAGE)) as other:
        for _ in range(8):
            threads = [
                threading.Thread(target=put, args=(each, 500, data))
                for each, data in zip((store, other), candidates, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert get(store, 500) in (*candidates, None)
        assert put(store, 500, candidates[0])
        assert get(store, 500) == candidates[0]


def test_default_page(server, bucket):
    with opened(s3(server.port)) as store:
        assert put(store, 600, content(600, 1_500_000))
        assert get(store, 600) == content(600, 1_500_000)
    names = [page_name(600, page).replace(".4.", ".256.") for page in (0, 1, 2)]
    assert [bucket("HEAD", name)[0] for name in names] == [200, 200, 404]


@pytest.mark.parametrize("value", [0, 1000, -4096, 4097, 1 << 27, "64k", True, None])
def test_a_page_size_that_cannot_be_is_said(value):
    with pytest.raises(SettingError, match=r"extra_config\.splitzip_page_bytes=.*4096"):
        open_store(s3(1, splitzip_page_bytes=value), max_object_bytes=MIB)


def test_a_region_that_is_missing_is_said():
    with pytest.raises(SettingError, match="extra_config has no s3_region"):
        open_store(s3(1, s3_region=None), max_object_bytes=MIB)


def test_server_that_stops_is_down_and_used_again_when_it_is_back(tmp_path):
    server = s3_server(tmp_path)
    try:
        with opened(s3(server.port, splitzip_page_bytes=PAGE)) as store:
            assert put(store, 1, content(1, 100_000))
            server.kill()
            assert get(store, 1, 5.0) is None
            assert wait_for(lambda: get(store, 1, 2.0) is None and store.health == "down")
            began = time.monotonic()
            assert not put(store, 2, b"data", 30.0)
            assert time.monotonic() - began < 1.0
            server.start()  # without what it had
            assert wait_for(lambda: put(store, 2, content(2, 100_000)), 40.0)
            assert get(store, 2) == content(2, 100_000)
            assert get(store, 1) is None
            assert store.health == "up"
            assert idle_within(store, 45.0)  # a call that hung gives its memory back late
    finally:
        server.kill()


def test_server_that_never_answers_is_given_up_within_the_deadline():
    hole = BlackHole()
    try:
        with opened(s3(hole.port)) as store:
            began = time.monotonic()
            assert get(store, 1, 1.2) is None
            assert not put(store, 1, b"data", 1.2)
            assert time.monotonic() - began < 4.0
            assert store.health == "down"
    finally:
        hole.close()


@pytest.mark.parametrize("scheme", ["resp", "valkey"])
def test_a_redis_server_that_is_full_or_restarted_costs_hits(scheme, tmp_path):
    server = redis_server(tmp_path, "--maxmemory", "32mb", "--maxmemory-policy", "noeviction")
    try:
        with opened({"lmcache.remote_url": f"{scheme}://127.0.0.1:{server.port}"}) as store:
            assert put(store, 1, content(1, 2 * MIB))
            assert not all(put(store, number, bytes(2 * MIB), 5.0) for number in range(2, 30))
            assert store.health == "read-only"
            assert get(store, 1) == content(1, 2 * MIB)
            server.kill()
            assert wait_for(lambda: get(store, 1, 2.0) is None)
            server.start()
            assert wait_for(lambda: put(store, 9, content(9, MIB), 5.0), 40.0)
            assert get(store, 9) == content(9, MIB)
            assert idle_within(store)
    finally:
        server.kill()
