"""One `tokenmill up` with both real engines, for all tests of a run."""

from collections.abc import Iterator

import pytest
from launched import Up
from models import packaged_gguf, smollm2_folder
from openai import OpenAI
from real import CONTEXT, GGUF, SLOTS, TORCH


@pytest.fixture(scope="session")
def real_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """SmolLM2 twice: as GGUF on llama.cpp and as safetensors on transformers."""
    up = Up(
        tmp_path_factory.mktemp("real"),
        *("--model", f"{GGUF}={packaged_gguf()}", "--model", f"{TORCH}={smollm2_folder()}"),
        *("--ctx", str(CONTEXT), "--slots", str(SLOTS), "--device", "cpu"),
    )
    try:
        yield up.ready()
    finally:
        up.clean()


@pytest.fixture
def openai(real_models: Up) -> Iterator[OpenAI]:
    """The official client, which is not told to try again: a failure shall show."""
    with OpenAI(base_url=f"{real_models.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(params=[GGUF, TORCH])
def model(request: pytest.FixtureRequest) -> str:
    """Each engine in turn."""
    return str(request.param)
