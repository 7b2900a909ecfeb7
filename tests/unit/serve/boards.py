"""Boards of Grafana that are made for vLLM: which series their expressions name, read off their files.

vllm-project/vllm               4b5c627c    vLLM's own
vllm-project/production-stack   a6c01db     six, of an engine, of its models, and of what stands before engines
"""

_LATENCY = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count
vllm:time_to_first_token_seconds_bucket
"""
_MODEL = f"""
{_LATENCY} vllm:time_to_first_token_seconds_sum vllm:time_to_first_token_seconds_count
vllm:prompt_tokens_total vllm:generation_tokens_total vllm:num_requests_running vllm:num_requests_waiting
vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket vllm:request_success_total
vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
vllm:request_max_num_generation_tokens_sum
"""
_OLD_GAP = "vllm:time_per_output_token_seconds_sum vllm:time_per_output_token_seconds_count"
_GAP = """
vllm:inter_token_latency_seconds_bucket vllm:inter_token_latency_seconds_sum vllm:inter_token_latency_seconds_count
"""
_MEAN_GAP = "vllm:request_time_per_output_token_seconds_sum vllm:request_time_per_output_token_seconds_count"
_FRONT = f"""
{_LATENCY} vllm:healthy_pods_total vllm:current_qps vllm:num_requests_running vllm:num_requests_waiting
vllm:gpu_prefix_cache_hits_total vllm:gpu_prefix_cache_queries_total
router_cpu_usage_percent router_memory_usage_percent router_disk_usage_percent
"""
_OLD_FRONT = f"{_FRONT} {_OLD_GAP} vllm:gpu_cache_usage_perc vllm:num_requests_swapped"
_BOARDS = {
    "vllm examples/observability/prometheus_grafana/grafana.json": f"{_MODEL} {_GAP} vllm:kv_cache_usage_perc",
    "helm/dashboards/vllm-dashboard.json": f"{_FRONT} {_MEAN_GAP} vllm:kv_cache_usage_perc",
    "helm/dashboards/vllm-model-metrics-dashboard.json": f"""
        {_MODEL} {_MEAN_GAP} vllm:request_time_per_output_token_seconds_bucket vllm:kv_cache_usage_perc
    """,
    "tutorials/terraform/coreweave/config/vllm-dashboard.json": _OLD_FRONT,
    "tutorials/terraform/coreweave/config/vllm-dashboard-oci.json": f"""
        {_MODEL} {_OLD_GAP} vllm:time_per_output_token_seconds_bucket vllm:num_requests_swapped
        vllm:gpu_cache_usage_perc vllm:cpu_cache_usage_perc
    """,
    "tutorials/terraform/eks/config/vllm-dashboard.json": _OLD_FRONT,
    "tutorials/terraform/nebius/config/vllm-dashboard.json": _OLD_FRONT,
}
BOARDS: dict[str, frozenset[str]] = {board: frozenset(names.split()) for board, names in _BOARDS.items()}
# Of the machine that vLLM's router runs on: an exporter of that machine has them, under names of its own.
NOT_SERVED = frozenset({"router_cpu_usage_percent", "router_memory_usage_percent", "router_disk_usage_percent"})
