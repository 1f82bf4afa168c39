"""Who runs each command of README.md and docs/: a test, a target of the Makefile that CI makes, or the demo.

A command that is not here fails a test, and so does an entry whose command is on no page any more.
"""

from __future__ import annotations

HERE = "tests/docs/test_commands.py::"
START = "tests/engine/test_start_page.py::test_the_start_page_word_for_word"
WHEEL = "tests/packaging/test_wheel.py::test_a_daemon_an_engine_that_saves_and_another_one_that_loads"
# Checks all flags of `kvlane serve`; the daemon itself runs in the tests of tests/daemon.
FLAGS = HERE + "test_the_daemon_takes_what_pages_tell_it"
UNIT = HERE + "test_the_unit_starts_a_daemon_as_systemd_would"
ROUTE_UNIT = HERE + "test_the_unit_starts_and_reloads_a_router_as_systemd_would"
ROUTE = "tests/router/test_route.py::test_it_takes_what_the_page_tells_it"
CONTROL = "tests/router/test_route_control.py::test_it_does_what_the_page_tells_it"
DIRECT = HERE + "test_engines_for_direct_hand_offs_are_configured_as_the_page_says"
CLUSTER = HERE + "test_daemons_of_a_cluster_start_as_the_page_says"
INDEX = HERE + "test_daemons_with_an_index_start_as_the_page_says"
PROXY = HERE + "test_the_router_starts_in_a_proxys_place_as_the_page_says"
REPLAY = HERE + "test_a_trace_is_replayed"
RECORD = HERE + "test_a_daemon_is_recorded_and_replayed_as_the_pages_say"

TRANSFER = """'{"kv_connector": "KVLaneConnector", "kv_role": "kv_both"}'"""

RUN_BY = {
    # README.md
    "pip install dist/kvlane-*.whl": WHEEL,
    "kvlane serve --pool-size 16gb": FLAGS,
    f"vllm serve MODEL --kv-transfer-config {TRANSFER}": HERE + "test_engines_start_as_on_the_start_page",
    "kvlane status": START,
    "kvlane doctor": "tests/daemon/test_cluster.py::test_the_doctor_says_whether_daemons_reach_each_other_both_ways",
    "python3 scripts/environment.py --without-kvlane vllm-0.32": "make fetch",
    ". .venvs/vllm-0.32/bin/activate": "make fetch",
    ".venvs/boot/bin/uv pip install dist/kvlane-*.whl": "make vllm",
    "python -m kvlane.demo.model --shape tiny out/tiny-model": START,
    "kvlane serve --pool-size 1gb &": FLAGS,
    # docs/hybrids.md
    "python -m kvlane.demo.model --shape gpt-oss out/gpt-oss": (
        "tests/engine/test_demo_model.py::test_a_family_is_made_as_the_page_says"
    ),
    "VLLM_CPU_KVCACHE_SPACE=1 vllm serve out/tiny-model --max-model-len 4096 --enforce-eager "
    f"--kv-transfer-config {TRANSFER}": HERE + "test_engines_start_as_on_the_start_page",
    "make demo": "make demo",
    "make demo-pd": "make demo-pd",
    "make demo-direct": "make demo-direct",
    "make demo-cluster": "make demo-cluster",
    "make test": "make test",
    # docs/configure.md
    "kvlane serve --pool-size 16gb --ssd /var/lib/kvlane": FLAGS,
    "KVLANE_POOL_SIZE=16gb KVLANE_SSD=/var/lib/kvlane kvlane serve": FLAGS,
    "kvlane serve --config examples/systemd/kvlane.toml": FLAGS,
    f"kvlane doctor --engine-config {TRANSFER}": HERE + "test_the_doctor_looks_at_an_engines_configuration",
    # docs/containers.md
    "helm upgrade --install kvlane examples/helm/kvlane --set image.repository=registry.example/kvlane "
    "--set daemon.poolGib=256": "tests/engine/test_chart.py::test_helm_takes_what_the_pages_say",
    # docs/operate.md
    "kvlane serve --otlp-endpoint http://127.0.0.1:4318": FLAGS,
    "kvlane route --otlp-endpoint http://127.0.0.1:4318 --otlp-sample 0.01 --worker http://127.0.0.1:8001": (
        "tests/router/test_route_traces.py::test_it_starts_as_the_page_says"
    ),
    "vllm serve MODEL --otlp-traces-endpoint http://127.0.0.1:4317": (
        "tests/connector/test_vllm_traces.py::test_vllm_keeps_the_header_if_it_is_told_to_export_traces"
    ),
    "kvlane status --watch": "tests/daemon/test_watch.py::test_a_watched_daemon_may_go_and_come_back",
    "python3 -m venv /opt/kvlane": WHEEL,
    "/opt/kvlane/bin/pip install dist/kvlane-*.whl": WHEEL,
    "cp examples/systemd/kvlane.toml /etc/kvlane.toml": UNIT,
    "cp examples/systemd/kvlane.service /etc/systemd/system/kvlane.service": UNIT,
    "systemctl daemon-reload": UNIT,
    "systemctl enable --now kvlane": UNIT,
    "cp examples/systemd/kvlane-route.toml /etc/kvlane-route.toml": ROUTE_UNIT,
    "cp examples/systemd/kvlane-route.service /etc/systemd/system/kvlane-route.service": ROUTE_UNIT,
    "systemctl enable --now kvlane-route": ROUTE_UNIT,
    "systemctl reload kvlane-route": ROUTE_UNIT,
    "curl -s http://127.0.0.1:9091/health": HERE + "test_health_and_metrics_are_asked_for",
    "curl -s http://127.0.0.1:9091/metrics": HERE + "test_health_and_metrics_are_asked_for",
    # docs/cluster.md
    "head -c 32 /dev/urandom | base64 > cluster.token; chmod 600 cluster.token": CLUSTER,
    "kvlane serve --pool-size 16gb --peers 10.0.0.1:9555,10.0.0.2:9555 --cluster-listen 0.0.0.0:9555 "
    "--cluster-advertise 10.0.0.1:9555 --cluster-token-file cluster.token": CLUSTER,
    "kvlane index --listen 0.0.0.0:9556 --advertise 10.0.0.1:9556 --token-file cluster.token": INDEX,
    "kvlane serve --pool-size 16gb --index 10.0.0.1:9556,10.0.0.2:9556 --cluster-listen 0.0.0.0:9555 "
    "--cluster-advertise 10.0.0.3:9555 --cluster-token-file cluster.token": INDEX,
    "curl -s http://127.0.0.1:9093/owners": "tests/daemon/test_index.py::"
    "test_the_page_of_owners_says_what_each_has",
    # docs/performance.md
    "kvlane bench --help": "tests/packaging/test_wheel.py::test_every_help_works_without_extras",
    "kvlane bench serve --model MODEL --num-prompts 50 --input-len 2000 --output-len 32 --request-rate 2": (
        HERE + "test_benchmarks_know_their_flags"
    ),
    "kvlane bench lookup --busy": (
        "tests/bench/test_micro.py::test_lookup_beside_saves_and_computing_threads_has_a_control"
    ),
    "kvlane replay TRACE": REPLAY,
    # docs/replay.md, docs/routing.md, docs/balance.md
    "kvlane route record TRACE --for 1h": (
        "tests/router/test_route_record.py::test_a_recording_is_replayed_through_a_fleet"
    ),
    "kvlane replay TRACE --route fleet.toml": (
        "tests/bench/test_replay_picture.py::test_a_trace_goes_through_a_simulated_fleet"
    ),
    "kvlane route --worker http://127.0.0.1:8100 --worker http://127.0.0.1:8101": ROUTE,
    "kvlane route --balance --worker http://127.0.0.1:8100 --worker http://127.0.0.1:8101": (
        "tests/router/test_route_balance.py::test_workers_get_roles_by_a_flag"
    ),
    "kvlane route --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200": ROUTE,
    'vllm serve M --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\'': (
        "tests/connector/test_vllm_events.py::test_listeners_hear_of_exactly_the_blocks_that_were_evicted"
    ),
    "kvlane route --worker http://127.0.0.1:8100 --tokenizer M=/models/M "
    "--kv-events http://127.0.0.1:8100=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558": (
        "tests/router/test_route_knowledge.py::test_a_router_that_starts_later_learns_by_replay"
    ),
    # docs/security.md
    "kvlane route --quiet-decisions --worker http://127.0.0.1:8100": (
        "tests/router/test_route_paths.py::test_quiet_decisions_do_not_tell_which_prompts_others_have_sent"
    ),
    # docs/router-reference.md
    "kvlane route list": CONTROL,
    "kvlane route drain http://127.0.0.1:8100 --wait": CONTROL,
    "kvlane route add http://127.0.0.1:8102 --role worker": CONTROL,
    "kvlane route remove http://127.0.0.1:8100": CONTROL,
    "kvlane route beat --to 127.0.0.1:30001 --role worker --url http://127.0.0.1:8100": (
        "tests/router/test_route_members.py::test_heartbeats_of_ours_tell_of_any_engine_and_end_with_a_goodbye"
    ),
    # docs/handoff.md
    "VLLM_CPU_OMP_THREADS_BIND=nobind vllm serve MODEL --port 8100 "
    '--kv-transfer-config \'{"kv_connector": "KVLaneConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"kvlane.direct": "on", "kvlane.direct.listen": "127.0.0.1:7100"}}\'': DIRECT,
    "kvlane route --config pair.toml": (
        "tests/router/test_route_pairs_many.py::test_the_pair_of_the_page_hands_over_directly"
    ),
    "VLLM_CPU_OMP_THREADS_BIND=nobind vllm serve MODEL --port 8200 "
    '--kv-transfer-config \'{"kv_connector": "KVLaneConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"kvlane.direct": "on"}}\'': DIRECT,
    # docs/p2p-nccl.md
    'kvlane doctor --engine-config \'{"kv_connector": "P2pNcclConnector", "kv_role": "kv_producer", '
    '"kv_port": "21001", "kv_connector_extra_config": {"kv_buffer_size": "1e1", "proxy_ip": "127.0.0.1", '
    '"proxy_port": "30001", "http_port": "20001"}}\'': HERE
    + "test_the_doctor_reads_a_p2p_nccl_configuration",
    "kvlane route --listen 127.0.0.1:10001 --ping 127.0.0.1:30001": PROXY,
    "kvlane route --listen 10.0.1.1:10001 --api-key-file keys --ping 10.0.1.1:30001 --ping-allow 10.0.1.0/24": PROXY,
    # docs/policies.md and docs/sizing.md
    "kvlane size CONFIG.json --tokens 1000000": HERE + "test_sizes_are_those_of_the_page",
    "kvlane record trace.jsonl --for 1h": RECORD,
    "kvlane replay trace.jsonl --beside": RECORD,
    "kvlane replay trace.jsonl --policy lru,learned --capacity 1tib,2tib": RECORD,
    "kvlane replay trace.jsonl --policy lru,learned --capacity 1tib --ssd 8tib": RECORD,
    "kvlane record TRACE --for 1h": RECORD,
    "kvlane replay TRACE --policy lru,arc,learned --capacity 1tib,2tib": RECORD,
}
# The commands of these pages and blocks are run as they stand, so each need not be named.
RUN_AS_A_WHOLE = {
    "docs/start.md": START,
    "docs/fabric.md": HERE + "test_certificates_are_made_and_fit_each_other",
}
