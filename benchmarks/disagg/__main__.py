"""Prefill and decode on two servers, over links of several rates: what compression is worth there.

Two network namespaces with a shaped link between them stand for two machines (`link.py`). The
prefill server and the store are on one side, the decode server on the other, vLLM's own
toy_proxy_server.py in front of both. Every prompt is asked of every arm, one after the other, and
then all of it again; where memory is short, arms with a codec and arms without have their turns one
after the other. `auto` gets a few requests on each link before it counts.

| arm                           | how the decode server comes by the prompt's KV cache             |
|-------------------------------|------------------------------------------------------------------|
| none                          | it computes it again: neither server has a connector             |
| nixl                          | vLLM's NixlConnector, raw                                        |
| raw, fast, dense, max, auto   | SplitZipConnector with that codec                                |

``python -m benchmarks.disagg`` measures all of it, which takes hours; `--arms`, `--links`,
`--models`, `--prompts` and `--repeats` choose a part, and `--resume` adds to what is there. It
needs root, and prints a table. build/disagg.json, or what `--out` names, holds the medians (`rows`)
and every single measurement; build/disagg-MODEL.png shows the speed-up against the link's rate.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks import models, texts
from benchmarks.disagg import table
from benchmarks.disagg.client import Answer, Prompt, ask, counters, same_tokens
from benchmarks.disagg.link import Link, LinkError
from benchmarks.disagg.serve import bench_serve
from benchmarks.disagg.servers import (
    ARMS,
    BUILD,
    CODECS,
    Fleet,
    Pair,
    Setup,
    end_tidily,
    groups_of,
    servers_of,
    servers_that_fit,
)
from vllm_splitzip.connector.reports import PERIOD_S
from vllm_splitzip.errors import SettingError
from vllm_splitzip.settings import AUTO, Settings

UNSHAPED = table.UNSHAPED
LINKS = ("20mbit", "50mbit", "200mbit", "1gbit", UNSHAPED)
PROMPT_TOKENS = (500, 1000, 1900)
RESULT = BUILD / "disagg.json"

SETTLE_S = 0.3
"""Seconds between two measurements."""

COUNTED_S = 10.0
"""Seconds for a server's counters to show a request that has been answered."""

WARM_UP_TOKENS = (320, None)
"""Of the longest prompt, in the requests that come first."""

SETTLING = 4
"""Requests of the longest prompt by which `auto` gets to know a link. Each of them is asked when
the decode side may tell of the link again."""


def main() -> None:
    options = parse()
    end_tidily()
    measurements = load(options.out) if options.resume else []
    arms = known_arms(options.arms)
    try:
        with Link() as link:
            for name in options.models:
                run_model(name, arms, link, options, measurements)
    except LinkError as error:
        sys.exit(str(error))
    finally:
        # Also when it is interrupted: what there is can be looked at.
        rows = table.rows(measurements)
        table.plot(rows, options.out)
        print(table.text(rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disagg", description="Prefill and decode over a shaped link."
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument(
        "--models", nargs="+", choices=list(models.SOURCES), default=list(models.SOURCES)
    )
    parser.add_argument("--prompts", nargs="+", type=int, default=list(PROMPT_TOKENS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--step-tokens", type=int, default=512, help="tokens prefilled at once")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at once")
    parser.add_argument(
        "--rps-repeats", type=int, default=1, help="repeats in which requests per second count"
    )
    parser.add_argument(
        "--rps-prompts", nargs="+", type=int, help="prompts of which they count; default: all"
    )
    parser.add_argument("--servers", type=int, help="most vLLM servers at a time")
    parser.add_argument("--out", type=Path, default=RESULT, help="default: build/disagg.json")
    parser.add_argument("--resume", action="store_true", help="keep what was measured before")
    parser.add_argument(
        "--bench-serve", action="store_true", help="run `vllm bench serve` on each proxy too"
    )
    return parser.parse_args()


def known_arms(wanted: Sequence[str]) -> list[str]:
    """Arms in their order, without codecs that this version does not have."""
    arms = []
    for arm in ARMS:
        if arm not in wanted:
            continue
        if arm in CODECS:
            try:
                Settings.from_extra_config({"codec": arm})
            except SettingError as error:
                print(f"without arm {arm}: {error}", flush=True)
                continue
        arms.append(arm)
    return arms


def run_model(
    name: str,
    arms: Sequence[str],
    link: Link,
    options: argparse.Namespace,
    measurements: list[dict[str, Any]],
) -> None:
    """Measure one model, with as many servers alive as memory allows."""
    setup = Setup(models.ensure(name), step_tokens=options.step_tokens)
    bench = Bench(name, setup, link, options, measurements)
    for group in groups_of(arms, options.servers or servers_that_fit(name)):
        if any(bench.missing(group)):
            with bench.fleet(group):
                bench.run(group)


class Bench:
    """Measures one model's arms. Every measurement is appended to `measurements` and saved."""

    def __init__(
        self,
        name: str,
        setup: Setup,
        link: Link,
        options: argparse.Namespace,
        measurements: list[dict[str, Any]],
    ) -> None:
        self._name = name
        self._setup = setup
        self._link = link
        self._options = options
        self._measurements = measurements
        self._references: dict[tuple[int, int], Answer] = {}
        self._salt = 0
        tokenizer = AutoTokenizer.from_pretrained(setup.model)
        count = max(options.repeats, options.concurrency)
        self._prompts = {
            tokens: texts.prompts(tokenizer, [tokens] * count) for tokens in options.prompts
        }

    def fleet(self, arms: Sequence[str]) -> Fleet:
        """Start the servers of some arms and warm them up."""
        started = time.monotonic()
        self._link.shape(None)
        self._say(f"starting {len(frozenset().union(*map(servers_of, arms)))} servers")
        self._fleet = Fleet(arms, self._setup)
        try:
            for arm in arms:
                self._warm_up(arm)
        except BaseException:
            self._fleet.__exit__(*sys.exc_info())
            raise
        self._say(f"ready after {time.monotonic() - started:.0f} s")
        return self._fleet

    def missing(self, arms: Sequence[str]) -> list[tuple[str, int, int, str]]:
        """(link, repeat, prompt tokens, arm) not measured yet, in their order."""
        there = {
            (row["link"], row["repeat"], row["prompt_tokens"], row["arm"])
            for row in self._measurements
            if row["model"] == self._name
        }
        cells = []
        for link in self._options.links:
            for repeat in range(self._options.repeats):
                turn = repeat % len(arms)
                for tokens in self._options.prompts:
                    # Another arm first in each repeat.
                    cells += [(link, repeat, tokens, arm) for arm in [*arms[turn:], *arms[:turn]]]
        return [cell for cell in cells if cell not in there]

    def run(self, arms: Sequence[str]) -> None:
        """Measure the arms of the fleet that was started last."""
        cells = self.missing(arms)
        for link in dict.fromkeys(link for link, *_ in cells):
            self._link.shape(None if link == UNSHAPED else link)
            here = [cell for cell in cells if cell[0] == link]
            if any(arm == AUTO for *_, arm in here):
                self._settle()
            for _, repeat, tokens, arm in here:
                self._measure_cell(link, repeat, tokens, arm)
        self._link.shape(None)
        if self._options.bench_serve:
            for arm in arms:
                self._say(f"vllm bench serve, {arm}, unshaped")
                bench_serve(
                    self._fleet.focus(arm).url,
                    self._setup.model,
                    min(self._options.prompts),
                    BUILD / f"disagg-bench-serve-{self._name}-{arm}.txt",
                )
                self._fleet.empty_store()

    def _measure_cell(self, link: str, repeat: int, tokens: int, arm: str) -> None:
        row = {
            "arm": arm,
            "model": self._name,
            "link": link,
            "prompt_tokens": tokens,
            "repeat": repeat,
            **self._measure(arm, tokens, repeat),
        }
        options = self._options
        if repeat < options.rps_repeats and tokens in (options.rps_prompts or options.prompts):
            row["rps"] = self._requests_per_second(arm, tokens)
        self._measurements.append(row)
        save(self._measurements, options)
        self._say(table.line(row))

    def _measure(self, arm: str, tokens: int, repeat: int) -> dict[str, Any]:
        """One request, alone."""
        prompt = self._prompt(tokens, repeat)
        reference = self._reference(tokens, repeat)
        pair = self._fleet.focus(arm)
        time.sleep(SETTLE_S)
        before = self._counters(pair)
        with self._link.watch() as traffic:
            [answer] = ask(pair.url, self._setup.model.name, [prompt], self._options.max_tokens)
        after = self._counters_after(pair, before)
        self._fleet.empty_store()

        def counted(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        seconds = {
            name: counted(f"vllm:splitzip_{name}_seconds_total")
            for name in ("encode", "put", "get", "decode")
        }
        return {
            "ttft_s": answer.ttft_s,
            "decode_ttft_s": counted("decode vllm:time_to_first_token_seconds_sum"),
            "prefill_s": answer.ttft_s - counted("decode vllm:time_to_first_token_seconds_sum"),
            "link_bytes": traffic.total_bytes,
            "link_s": traffic.seconds,
            "codec_s": seconds["encode"] + seconds["decode"],
            **{f"{name}_s": value for name, value in seconds.items()},
            "frames_failed": counted("vllm:splitzip_frames_failed_total"),
            "tokens_equal": same_tokens(reference, answer),
            "tokens_identical": reference.token_ids == answer.token_ids,
        }

    def _requests_per_second(self, arm: str, tokens: int) -> float:
        """Of as many requests as are asked at once, until the last token of the last."""
        prompts = [self._prompt(tokens, place) for place in range(self._options.concurrency)]
        answers = ask(
            self._fleet.focus(arm).url,
            self._setup.model.name,
            prompts,
            self._options.max_tokens,
        )
        self._fleet.empty_store()
        return len(answers) / max(answer.total_s for answer in answers)

    def _warm_up(self, arm: str) -> None:
        """The first requests of a process, and of a pair, pay for what later ones find ready."""
        for length in WARM_UP_TOKENS:
            whole = self._prompt(max(self._options.prompts), 0)
            prompt = Prompt(whole.token_ids[:length], whole.salt)
            ask(self._fleet.focus(arm).url, self._setup.model.name, [prompt], 2)
        self._fleet.empty_store()

    def _settle(self) -> None:
        """Let `auto` get to know a link."""
        url = self._fleet.focus(AUTO).url
        for _ in range(SETTLING):
            began = time.monotonic()
            prompt = self._prompt(max(self._options.prompts), 0)
            ask(url, self._setup.model.name, [prompt], 2)
            time.sleep(max(0.0, PERIOD_S - (time.monotonic() - began)))
        self._fleet.empty_store()

    def _reference(self, tokens: int, repeat: int) -> Answer:
        """What one server makes of a prompt that it computes itself."""
        known = self._references.get((tokens, repeat))
        if known is None:
            url = self._fleet.focus(next(iter(self._fleet.pairs))).decode_url
            prompt = self._prompt(tokens, repeat)
            [known] = ask(url, self._setup.model.name, [prompt], self._options.max_tokens)
            self._references[tokens, repeat] = known
        return known

    def _prompt(self, tokens: int, place: int) -> Prompt:
        """A prompt as nobody has seen it before."""
        self._salt += 1
        return Prompt(self._prompts[tokens][place], f"{time.time_ns()}-{self._salt}")

    def _counters(self, pair: Pair) -> dict[str, float]:
        decode = counters(pair.decode_url)
        result = {f"decode {name}": value for name, value in decode.items()}
        prefill = counters(pair.prefill_url)
        for name in {*decode, *prefill}:
            result[name] = decode.get(name, 0.0) + prefill.get(name, 0.0)
        return result

    def _counters_after(self, pair: Pair, before: dict[str, float]) -> dict[str, float]:
        """The counters once they show the request that has been answered."""
        deadline = time.monotonic() + COUNTED_S
        name = "decode vllm:time_to_first_token_seconds_count"
        while True:
            after = self._counters(pair)
            if after.get(name, 0.0) > before.get(name, 0.0):
                return after
            if time.monotonic() > deadline:
                raise RuntimeError(f"{pair.decode_url} does not count its requests")
            time.sleep(0.05)

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self._name:13} {text}", flush=True)


def load(path: Path) -> list[dict[str, Any]]:
    """Measurements of an earlier run; none if there is no such file."""
    if not path.exists():
        return []
    measurements: list[dict[str, Any]] = json.loads(path.read_text())["measurements"]
    return measurements


def save(measurements: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write everything so far, so that nothing is lost when the run is ended."""
    rows = table.rows(measurements)
    result = {
        "rows": [asdict(row) for row in rows],
        "measurements": list(measurements),
        "options": {
            "max_tokens": options.max_tokens,
            "step_tokens": options.step_tokens,
            "concurrency": options.concurrency,
        },
    }
    scratch = options.out.with_suffix(".part")
    scratch.write_text(json.dumps(result, indent=1) + "\n")
    scratch.replace(options.out)


if __name__ == "__main__":
    main()
