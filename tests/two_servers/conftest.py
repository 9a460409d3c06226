import pytest
from transformers import AutoTokenizer

from benchmarks import models, texts
from two_servers.pair import Pair


@pytest.fixture(scope="package")
def model():
    return models.ensure("smollm2-135m")


@pytest.fixture(scope="package")
def pair(model, tmp_path_factory):
    """A prefill and a decode server; started once for all tests of this directory."""
    pair = Pair(tmp_path_factory.mktemp("pair"), model)
    yield pair
    pair.close()


@pytest.fixture(scope="package")
def text(model):
    """Yields prompts of given lengths (tokens) that share no prefix with any yielded before."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = []

    def prompts(*wanted):
        lengths.extend(wanted)
        return texts.prompts(tokenizer, lengths)[-len(wanted) :]

    return prompts


@pytest.fixture(autouse=True)
def nothing_left_behind(pair):
    """Each test begins with empty stores and caches; when it ends, nothing may be held on to."""
    pair.fresh()
    yield
    pair.settle()
