"""Boards that are made for vLLM find what they plot in /metrics of this server."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from unit.serve.boards import BOARDS, NOT_SERVED
from unit.serve.scripted import asking, scripted
from weft.serve.metrics import Metrics

# Of other boards of vLLM's, and of alerts.
OTHERS = """
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:num_preemptions_total
vllm:iteration_tokens_total_bucket vllm:request_inference_time_seconds_bucket vllm:request_params_n_bucket
vllm:request_params_max_tokens_bucket vllm:spec_decode_num_drafts_total vllm:spec_decode_num_draft_tokens_total
vllm:spec_decode_num_accepted_tokens_total vllm:cache_config_info
""".split()  # noqa: SIM905
OF_THE_SERVER = {"vllm:healthy_pods_total", "vllm:current_qps"}  # and of no model


async def series() -> dict[str, dict[str, str]]:
    """Return all series after two answers, each with its labels."""
    model = scripted("hello")
    engine: Any = model.engine
    engine.step_s = 0.01  # else all tokens come together, and there is no gap between them
    async with asking(model) as client:
        await client.chat()
        await client.chunks()
        text = (await client.http.get("/metrics")).text
    metrics = Metrics({"tiny": model})
    metrics.step("tiny")(1, 2, 0.1)  # which a real engine tells
    return {
        sample.name: sample.labels
        for told in (metrics.text().decode(), text)
        for family in text_string_to_metric_families(told)
        for sample in family.samples
    }


@pytest.mark.parametrize("board", BOARDS)
async def test_a_board_finds_its_series(board: str) -> None:
    found = await series()
    assert BOARDS[board] - set(found) <= NOT_SERVED
    for name in BOARDS[board] - NOT_SERVED - OF_THE_SERVER:
        assert found[name]["model_name"] == "tiny", name
    assert len(BOARDS) == 7


async def test_other_names_of_vllm_are_there() -> None:
    found = await series()
    assert [name for name in OTHERS if name not in found] == []
    assert {*found["vllm:request_success_total"]} == {"engine", "finished_reason", "model_name"}
