"""The timeline: what is in its files, and that nothing is when it is off."""

import json
import time

import pytest

from vllm_splitzip.connector.trace import open_trace
from vllm_splitzip.errors import SettingError


def read(path):
    """Events of a trace, as its readers see it: an array whose end may be missing."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


def test_spans_have_the_times_of_the_wall_clock(tmp_path):
    trace = open_trace(str(tmp_path / "new"), "worker")
    before = time.time()
    with trace.span("get", frame="0a"):
        time.sleep(0.02)
    after = time.time()
    [path] = (tmp_path / "new").iterdir()  # It can be read while the process still runs.
    name, span = read(path)
    trace.close()
    assert name["args"] == {"name": "worker"}
    assert span["name"] == "get"
    assert span["args"] == {"frame": "0a"}
    assert span["dur"] >= 0.02e6
    # The two clocks are not read at the same instant, and may be slewed against each other.
    assert before - 0.01 <= span["ts"] / 1e6 <= (span["ts"] + span["dur"]) / 1e6 <= after + 0.01


def test_a_span_ends_with_an_error_too_and_nothing_follows_a_close(tmp_path):
    trace = open_trace(str(tmp_path), "worker")
    with pytest.raises(ValueError, match="no frame"), trace.span("decode"):
        raise ValueError("no frame")
    trace.close()
    with trace.span("late"):
        pass
    trace.close()
    [path] = tmp_path.iterdir()
    assert [event["name"] for event in read(path)] == ["process_name", "decode"]


def test_off_writes_nothing_and_a_bad_directory_is_named(tmp_path):
    trace = open_trace(None, "worker")
    with trace.span("get", frame="0a"):
        trace.between("load", time.monotonic())
    trace.close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="trace_dir"):
        open_trace(str(tmp_path / "file" / "below"), "worker")
