"""The panels of the Grafana dashboards, as scripts/dashboards.py writes them.

A query is a legend and an expression. scripts/dashboards.py adds what all of them share: `{job=~"$job", ...}` to each
metric, and `[$__rate_interval]` to `rate(METRIC)` and `increase(METRIC)`. To add a panel, add a call to a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

Query = tuple[str, str]


@dataclass(frozen=True)
class Panel:
    """One panel."""

    kind: str
    title: str
    unit: str
    """As Grafana calls it; scripts/dashboards.py has the list."""
    how: str
    """One sentence: how to read the panel, and what to do."""
    queries: tuple[Query, ...]
    width: int = 8
    """Columns of 24."""
    is_stacked: bool = False
    is_alarm: bool = False
    """A stat that is red from 1 on."""
    units: dict[str, str] = field(default_factory=dict)
    """Units of a table's columns, by legend. Others are numbers."""


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]
    is_folded: bool = False
    """Opened by a click: parts that not everybody uses. Grafana asks nothing for a folded row."""


@dataclass(frozen=True)
class Variable:
    """A list at the top of a dashboard, from which the reader chooses values of a label."""

    label: str
    values: str
    """Grafana's query for its values."""
    every: str = ".*"
    """A regular expression that stands for all values."""


@dataclass(frozen=True)
class Dashboard:
    """A dashboard of one program."""

    name: str
    title: str
    parts: tuple[str, ...]
    """Headings of docs/reference/metrics.md whose metrics it may use; "engines" stands for engine-metrics.md."""
    shared: str
    """Matchers that every metric gets."""
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]


def _times(title: str, unit: str, how: str, *queries: Query, width: int = 8, stacked: bool = False) -> Panel:
    return Panel("timeseries", title, unit, how, queries, width, is_stacked=stacked)


def _stat(title: str, unit: str, how: str, *queries: Query, alarm: bool = False) -> Panel:
    return Panel("stat", title, unit, how, queries, 6, is_alarm=alarm)


def _table(
    title: str, how: str, *queries: Query, width: int = 12, units: dict[str, str] | None = None
) -> Panel:
    return Panel("table", title, "none", how, queries, width, units=units or {})


def _heatmap(title: str, unit: str, how: str, expression: str, width: int = 8) -> Panel:
    return Panel("heatmap", title, unit, how, (("{{le}}", expression),), width)


def _quantiles(histogram: str, by: str = "") -> tuple[Query, Query]:
    """The median and the 95th percentile of a histogram."""
    buckets = f"sum by ({by}le) (rate({histogram}_bucket))"
    return (
        ("median", f"histogram_quantile(0.5, {buckets})"),
        ("95 %", f"histogram_quantile(0.95, {buckets})"),
    )


def _process() -> tuple[Panel, ...]:
    """What daemon and router say of their process."""
    return (
        _times(
            "CPU cores in use",
            "none",
            "Near the number of cores that the program may use, everything else slows down: give it more.",
            ("{{instance}}", "sum by (instance) (rate(process_cpu_seconds_total))"),
        ),
        _times(
            "Memory",
            "bytes",
            "The daemon's includes the pool; if it grows for days without more traffic, report a leak.",
            ("{{instance}}", "sum by (instance) (process_resident_memory_bytes)"),
        ),
        _table(
            "Versions and uptime",
            "A program that has just started knows no blocks; different versions point to an upgrade under way.",
            (
                "up for",
                "(time() - process_start_time_seconds) * on (job, instance) group_left (version) kvlane_build_info",
            ),
            width=8,
            units={"up for": "s"},
        ),
    )


_HITS: Final = "sum(rate(kvlane_hit_blocks_total))"
_MISSES: Final = "sum(rate(kvlane_missed_blocks_total))"
_RANGE_HITS: Final = "sum(increase(kvlane_hit_blocks_total[$__range]))"
_RANGE_MISSES: Final = "sum(increase(kvlane_missed_blocks_total[$__range]))"

_NAMED: Final = '{name=~"$name"}'
_NAMED_HITS: Final = f"sum by (name) (rate(kvlane_hit_blocks_total{_NAMED}))"
_NAMED_MISSES: Final = f"sum by (name) (rate(kvlane_missed_blocks_total{_NAMED}))"


def _of_all_daemons(ratio: str) -> str:
    """The mean of a ratio by window, weighted by lookups, as the rules in examples/prometheus record it."""
    return (
        f"sum by (window) ({ratio} * kvlane_hit_window_blocks) / sum by (window) (kvlane_hit_window_blocks)"
    )


DAEMON: Final = Dashboard(
    "daemon",
    "kvlane: daemon",
    ("The daemon",),
    'job=~"$job", instance=~"$instance"',
    (
        Variable("job", 'label_values(up{job=~"(.*/)?kvlane"}, job)', "(.*/)?kvlane"),
        Variable("instance", 'label_values(up{job=~"$job"}, instance)'),
        Variable("name", 'label_values(kvlane_namespace_blocks{job=~"$job", instance=~"$instance"}, name)'),
    ),
    (
        Row(
            "Does it pay?",
            (
                _stat(
                    "Daemons",
                    "none",
                    "If fewer answer than are known, look at the missing one's log: its engines compute all prompts.",
                    ("answer", "sum(up)"),
                    ("known", "count(up)"),
                ),
                _stat(
                    "Hit rate in this time",
                    "percentunit",
                    "The share of looked-up blocks that were found in the time that the dashboard shows.",
                    ("hit rate", f"{_RANGE_HITS} / ({_RANGE_HITS} + {_RANGE_MISSES})"),
                ),
                _stat(
                    "Engines",
                    "none",
                    "If fewer are complete than schedulers are connected, workers are missing: see the engine's log.",
                    ("complete", "sum(kvlane_engines) or vector(0)"),
                    ("schedulers", 'sum(kvlane_sessions{role="scheduler"})'),
                ),
                _stat(
                    "Damaged blocks in this time",
                    "none",
                    "Above 0, bytes in the pool changed by themselves: test the machine's memory.",
                    ("damaged", "sum(increase(kvlane_scrub_bad_blocks_total[$__range]))"),
                    alarm=True,
                ),
                _times(
                    "Hit rate and its ceiling",
                    "percentunit",
                    "More memory narrows the gap; hits above the ceiling are older than the window, or of other hosts.",
                    ("hits, last {{window}}", _of_all_daemons("kvlane_hit_ratio")),
                    ("ceiling, last {{window}}", _of_all_daemons("kvlane_hit_ceiling_ratio")),
                    width=12,
                ),
                _times(
                    "Bytes of hits, by where they were",
                    "Bps",
                    "If many hits are on the SSD, a larger pool makes them faster; if none are, the SSD is no use.",
                    ("{{tier}}", "sum by (tier) (rate(kvlane_hit_bytes_total))"),
                    width=12,
                    stacked=True,
                ),
                _times(
                    "Pool in use",
                    "percentunit",
                    "Near 1 is normal; if it stays far below for days, the pool is larger than the traffic needs.",
                    (
                        "{{instance}}",
                        "sum by (instance) (kvlane_pool_used_bytes) / sum by (instance) (kvlane_pool_bytes)",
                    ),
                    width=12,
                ),
                _times(
                    "How long evicted blocks had stayed",
                    "s",
                    "If users pause longer than the median between turns, many find their blocks gone: add memory.",
                    *_quantiles("kvlane_evicted_residence_seconds"),
                    width=12,
                ),
            ),
        ),
        Row(
            "The pool",
            (
                _times(
                    "Saved and evicted",
                    "Bps",
                    "In a full pool the two are alike; what counts is how long evicted blocks had stayed.",
                    ("saved", "sum(rate(kvlane_saved_bytes_total))"),
                    ("evicted", "sum(rate(kvlane_evicted_bytes_total))"),
                ),
                _times(
                    "Free bytes",
                    "bytes",
                    "Bytes for some sizes only were left by other models or settings; evictions free them for all.",
                    ("for blocks of any size", "sum(kvlane_pool_unused_bytes)"),
                    (
                        "for some sizes only",
                        "sum(kvlane_pool_bytes) - sum(kvlane_pool_used_bytes) - sum(kvlane_pool_unused_bytes)",
                    ),
                    stacked=True,
                ),
                _times(
                    "Free places by size",
                    "short",
                    "Only shards of a size take its places: many free places of one size mean that its engines went.",
                    ("{{size}} bytes", "sum by (size) (kvlane_pool_free_extents)"),
                ),
            ),
        ),
        Row(
            "Saves",
            (
                _times(
                    "Blocks saved, and why others were not",
                    "cps",
                    "If blocks find no room, enlarge the pool, or raise --seal-threads while the checksum queue grows.",
                    ("saved", "sum(rate(kvlane_sealed_blocks_total))"),
                    ("the pool had them", "sum(rate(kvlane_save_present_blocks_total))"),
                    ("another engine saves them", "sum(rate(kvlane_save_in_flight_blocks_total))"),
                    ("no room", "sum(rate(kvlane_save_no_room_blocks_total))"),
                    ("not admitted", "sum(rate(kvlane_save_not_admitted_blocks_total))"),
                    width=12,
                ),
                _times(
                    "Blocks under way",
                    "short",
                    "If the checksum queue grows, raise --seal-threads; if promises never fall, an engine is stuck.",
                    ("being saved", "sum(kvlane_claimed_blocks)"),
                    ("wait for their checksum", "sum(kvlane_seal_queue_blocks)"),
                    ("promised to engines", "sum(kvlane_leased_blocks)"),
                    width=12,
                ),
            ),
        ),
        Row(
            "Lookups and other calls",
            (
                _times(
                    "Blocks looked up",
                    "cps",
                    "Found blocks are not computed again; if nothing is looked up, no engine uses the daemon.",
                    ("found", _HITS),
                    ("missed", _MISSES),
                    width=12,
                    stacked=True,
                ),
                _heatmap(
                    "Time of lookups",
                    "s",
                    "Lookups that wait for an SSD, a host or a save are slow; if all lookups are, this host is busy.",
                    'sum by (le) (rate(kvlane_request_duration_seconds_bucket{call="Lookup"}))',
                    width=12,
                ),
                _times(
                    "Slowest 1 % of calls",
                    "s",
                    "If one call is slow, its part of the daemon is; if all are, the daemon has too few CPU cores.",
                    (
                        "{{call}}",
                        "histogram_quantile(0.99, sum by (call, le)"
                        " (rate(kvlane_request_duration_seconds_bucket))) >= 0",
                    ),
                    width=12,
                ),
                _times(
                    "Refusals and lost connections",
                    "cps",
                    "The daemon's log has the reason of each refusal; turned away are strangers, or too many scrapes.",
                    ("refused: {{call}}", "sum by (call) (rate(kvlane_requests_refused_total))"),
                    ("turned away: {{door}}", "sum by (door) (rate(kvlane_connections_turned_away_total))"),
                    ("not our protocol", "sum(rate(kvlane_bad_frames_total))"),
                    ("leases expired", "sum(rate(kvlane_lease_expired_total))"),
                    width=12,
                ),
            ),
        ),
        Row(
            "Namespaces",
            (
                _table(
                    "Namespaces",
                    "A namespace without engines keeps its bytes until they are evicted; `kvlane drop` frees them now.",
                    ("bytes", f"sum by (namespace, name) (kvlane_namespace_bytes{_NAMED})"),
                    ("blocks", f"sum by (namespace, name) (kvlane_namespace_blocks{_NAMED})"),
                    ("engines", f"sum by (namespace, name) (kvlane_engines{_NAMED})"),
                    units={"bytes": "bytes", "blocks": "short"},
                ),
                _times(
                    "Hit rate by namespace",
                    "percentunit",
                    "If one namespace falls, its prompts changed; if all fall, look at what evicted blocks had stayed.",
                    ("{{name}}", f"{_NAMED_HITS} / ({_NAMED_HITS} + {_NAMED_MISSES})"),
                    width=12,
                ),
                _table(
                    "Hits of namespaces, and their ceilings",
                    "The namespace that is farthest below its ceiling gains most from a larger pool.",
                    (
                        "hits",
                        f"max by (instance, namespace, name, window) (kvlane_namespace_hit_ratio{_NAMED})",
                    ),
                    (
                        "ceiling",
                        f"max by (instance, namespace, name, window) (kvlane_namespace_hit_ceiling_ratio{_NAMED})",
                    ),
                    width=24,
                    units={"hits": "percentunit", "ceiling": "percentunit"},
                ),
            ),
        ),
        Row(
            "Awaited saves: prompts that another engine hands over through the pool",
            (
                _times(
                    "Lookups that wait",
                    "short",
                    "A number that only grows means that prefill engines do not keep up, or have gone.",
                    ("lookups", "sum(kvlane_hand_offs_waiting)"),
                    ("blocks that they await", "sum(kvlane_hand_off_blocks)"),
                ),
                _times(
                    "How waits end",
                    "cps",
                    "Ready and complete are good; after the others the decode engine computes the rest: see the log.",
                    ("{{outcome}}", "sum by (outcome) (rate(kvlane_hand_offs_total))"),
                    stacked=True,
                ),
                _times(
                    "Time of waits",
                    "s",
                    "Lookups wait while the prompt is still computed; long waits ask for more prefill engines.",
                    *_quantiles("kvlane_hand_off_wait_seconds"),
                ),
            ),
        ),
        Row(
            "SSD",
            (
                _stat(
                    "SSDs that take no writes",
                    "none",
                    "Above 0, `kvlane status` says which SSD failed or is full, and why.",
                    ("degraded", "sum(kvlane_ssd_degraded)"),
                    alarm=True,
                ),
                _times(
                    "Bytes on the SSD",
                    "bytes",
                    "It grows up to the size of --ssd; then new blocks take the place of old ones.",
                    ("{{instance}}", "sum by (instance) (kvlane_ssd_bytes)"),
                    width=9,
                ),
                _times(
                    "Written and read back",
                    "Bps",
                    "Compare writes with the disk's endurance; if nothing is read back, the SSD brings no hits.",
                    ("written", "sum(rate(kvlane_ssd_written_bytes_total))"),
                    ("read back", "sum(rate(kvlane_ssd_fetched_bytes_total))"),
                    width=9,
                ),
                _times(
                    "Bytes that wait to be written",
                    "bytes",
                    "A backlog that stays high means that engines save faster than this SSD writes.",
                    ("{{device}}", "sum by (instance, device) (kvlane_ssd_backlog_bytes)"),
                    width=12,
                ),
                _times(
                    "Blocks that the SSD lost or did not get",
                    "cps",
                    "After damaged ones check the disk's health; with many unwritten ones the SSD is too slow.",
                    ("unwritten", "sum(rate(kvlane_ssd_unwritten_blocks_total))"),
                    ("not read back", "sum(rate(kvlane_ssd_failed_fetches_total))"),
                    ("damaged", "sum(rate(kvlane_ssd_damaged_blocks_total))"),
                    ("made room", "sum(rate(kvlane_ssd_dropped_blocks_total))"),
                    width=12,
                ),
                _heatmap(
                    "Time of a read",
                    "s",
                    "A lookup waits for its reads; if a band rises with the load, the SSD is at its limit: add one.",
                    'sum by (le) (rate(kvlane_ssd_operation_seconds_bucket{operation="read"}))',
                    width=12,
                ),
                _times(
                    "Slowest 5 % of reads and writes",
                    "s",
                    "An SSD that is slower than the others is worn, full or shared: check its health.",
                    (
                        "{{instance}} {{device}}: {{operation}}",
                        "histogram_quantile(0.95, sum by (instance, device, operation, le)"
                        " (rate(kvlane_ssd_operation_seconds_bucket)))",
                    ),
                    width=12,
                ),
            ),
            is_folded=True,
        ),
        Row(
            "Other hosts",
            (
                _times(
                    "Daemons and replicas out of reach",
                    "short",
                    "Above 0, run `kvlane doctor` on this host and the other one: it tests both ways.",
                    (
                        "{{instance}}: daemons",
                        'sum by (instance) (kvlane_cluster_members{state="not reached"})',
                    ),
                    (
                        "{{instance}}: replicas of the index",
                        'sum by (instance) (kvlane_cluster_replicas{state="not reached"})',
                    ),
                ),
                _times(
                    "Bytes from and to other daemons",
                    "Bps",
                    "Bytes that came are hits from other hosts; compare the sum with what the network carries.",
                    ("came", "sum(rate(kvlane_cluster_fetched_bytes_total))"),
                    ("lent", "sum(rate(kvlane_cluster_lent_bytes_total))"),
                ),
                _times(
                    "What did not come",
                    "cps",
                    "Blocks that fail in numbers point to a slow or lost host; damaged ones to its memory or network.",
                    ("blocks failed", "sum(rate(kvlane_cluster_failed_blocks_total))"),
                    ("blocks damaged", "sum(rate(kvlane_cluster_damaged_blocks_total))"),
                    ("requests refused", "sum(rate(kvlane_cluster_refused_loans_total))"),
                    ("loans expired", "sum(rate(kvlane_cluster_expired_loans_total))"),
                ),
            ),
            is_folded=True,
        ),
        Row(
            "GPUs and their links",
            (
                _times(
                    "Loads over each GPU's link",
                    "Bps",
                    "If one link is at its limit and others are idle, --rails lets loads use the others too.",
                    (
                        "{{instance}} GPU {{gpu}}",
                        "sum by (instance, gpu) (rate(kvlane_loaded_by_link_bytes_total))",
                    ),
                    width=12,
                ),
            ),
            is_folded=True,
        ),
        Row("Process", _process()),
    ),
)

_PROMPTS: Final = "sum(rate(vllm:prompt_tokens_total))"

ENGINE: Final = Dashboard(
    "engine",
    "kvlane: engines",
    ("engines",),
    'instance=~"$instance", model_name=~"$model_name"',
    (
        Variable("instance", "label_values(vllm:kvlane_lookups_total, instance)"),
        Variable("model_name", 'label_values(vllm:kvlane_lookups_total{instance=~"$instance"}, model_name)'),
    ),
    (
        Row(
            "Does it pay?",
            (
                _stat(
                    "Prompt tokens loaded in this time",
                    "short",
                    "These tokens were not computed; if there are none, look at the lookups below.",
                    ("tokens", "sum(increase(vllm:kvlane_hit_tokens_total[$__range]))"),
                ),
                _stat(
                    "Share of all prompt tokens",
                    "percentunit",
                    "The part of the prompts that the daemon saved engines from computing.",
                    (
                        "loaded",
                        "sum(increase(vllm:kvlane_hit_tokens_total[$__range]))"
                        " / sum(increase(vllm:prompt_tokens_total[$__range]))",
                    ),
                ),
                _stat(
                    "Failed loads in this time",
                    "none",
                    "Above 0, the daemon, a GPU or an SSD failed: both logs say which.",
                    ("failed", "sum(increase(vllm:kvlane_failed_loads_total[$__range]))"),
                    alarm=True,
                ),
                _stat(
                    "Errors in this time",
                    "none",
                    "Above 0, the connector survived an error: send us the engine's log.",
                    ("errors", "sum(increase(vllm:kvlane_errors_total[$__range]))"),
                    alarm=True,
                ),
                _times(
                    "Where prompt tokens come from",
                    "percentunit",
                    "The rest is computed; if vLLM's own cache has nearly all hits, the daemon has little to add.",
                    ("the daemon", f"sum(rate(vllm:kvlane_hit_tokens_total)) / {_PROMPTS}"),
                    ("other engines", f"sum(rate(vllm:kvlane_direct_landed_tokens_total)) / {_PROMPTS}"),
                    ("vLLM's own cache", f"sum(rate(vllm:prefix_cache_hits_total)) / {_PROMPTS}"),
                    width=12,
                    stacked=True,
                ),
                _times(
                    "Lookups",
                    "cps",
                    "Timeouts mean a daemon that is slow or stopped; without a daemon see the engine's log.",
                    ("found blocks", "sum(rate(vllm:kvlane_hits_total))"),
                    ("found nothing", "sum(rate(vllm:kvlane_misses_total))"),
                    ("timeout", "sum(rate(vllm:kvlane_timeouts_total))"),
                    ("no daemon", "sum(rate(vllm:kvlane_unavailable_total))"),
                    width=12,
                    stacked=True,
                ),
                _times(
                    "Time of a load",
                    "s",
                    "A load pays if it is shorter than computing the same tokens; slow loads point to a busy link.",
                    (
                        "{{instance}}",
                        "sum by (instance) (rate(vllm:kvlane_load_seconds_total))"
                        " / sum by (instance) (rate(vllm:kvlane_load_jobs_total))",
                    ),
                ),
                _times(
                    "Time of a lookup",
                    "s",
                    "A request waits this long before it runs; fetches from SSDs and other hosts take longer.",
                    (
                        "{{instance}}",
                        "sum by (instance) (rate(vllm:kvlane_lookup_seconds_total))"
                        " / sum by (instance) (rate(vllm:kvlane_lookups_total))",
                    ),
                ),
                _times(
                    "Requests that could not use the cache",
                    "cps",
                    "Their blocks' content has no known identity: docs/identity.md says which requests these are.",
                    ("{{instance}}", "sum by (instance) (rate(vllm:kvlane_unshared_requests_total))"),
                ),
            ),
        ),
        Row(
            "Loads and saves",
            (
                _times(
                    "Loaded and saved",
                    "Bps",
                    "If engines save much and load little, prompts have little in common, or the pool is too small.",
                    ("loaded", "sum(rate(vllm:kvlane_load_bytes_total))"),
                    ("saved", "sum(rate(vllm:kvlane_save_bytes_total))"),
                ),
                _times(
                    "Speed of a load",
                    "Bps",
                    "Compare it with what the link carries; loads that run at once share the link.",
                    (
                        "{{instance}}",
                        "sum by (instance) (rate(vllm:kvlane_load_bytes_total))"
                        " / sum by (instance) (rate(vllm:kvlane_load_seconds_total))",
                    ),
                ),
                _times(
                    "Time of a save",
                    "s",
                    "Saves run beside the engine's steps; if they take longer, more blocks are skipped.",
                    (
                        "{{instance}}",
                        "sum by (instance) (rate(vllm:kvlane_save_seconds_total))"
                        " / sum by (instance) (rate(vllm:kvlane_save_jobs_total))",
                    ),
                ),
                _times(
                    "Blocks saved or not",
                    "cps",
                    "Skipped blocks were lost for later requests: the daemon was away, or too slow for this engine.",
                    ("saved", "sum(rate(vllm:kvlane_save_blocks_total))"),
                    ("the daemon had them", "sum(rate(vllm:kvlane_present_blocks_total))"),
                    ("skipped", "sum(rate(vllm:kvlane_skipped_blocks_total))"),
                    ("taken back", "sum(rate(vllm:kvlane_withdrawn_blocks_total))"),
                ),
                _times(
                    "Failures",
                    "cps",
                    "After a failed load the engine computes, or by kv_load_failure_policy fails: both logs say why.",
                    ("loads", "sum(rate(vllm:kvlane_failed_loads_total))"),
                    ("saves", "sum(rate(vllm:kvlane_failed_saves_total))"),
                    ("saves without an answer", "sum(rate(vllm:kvlane_save_timeouts_total))"),
                ),
                _times(
                    "Connections to the daemon",
                    "cps",
                    "A few are normal when a daemon or engine starts; a steady rate means that connections break.",
                    ("opened", "sum(rate(vllm:kvlane_connects_total))"),
                    ("lost", "sum(rate(vllm:kvlane_disconnects_total))"),
                ),
            ),
        ),
        Row(
            "Hand-offs through the daemon",
            (
                _times(
                    "Prefill engines",
                    "cps",
                    "Prompts that were not handed over are computed twice: the prefill engine's log says why.",
                    ("handed over", "sum(rate(vllm:kvlane_handed_over_total))"),
                    ("not handed over", "sum(rate(vllm:kvlane_not_handed_over_total))"),
                    width=12,
                ),
                _times(
                    "Decode engines",
                    "cps",
                    "If engines ignore hand-offs, they use another daemon or other content than the prefill engine.",
                    ("waited", "sum(rate(vllm:kvlane_awaited_hand_offs_total))"),
                    ("found less than named", "sum(rate(vllm:kvlane_short_hand_offs_total))"),
                    ("ignored", "sum(rate(vllm:kvlane_ignored_hand_offs_total))"),
                    width=12,
                ),
            ),
            is_folded=True,
        ),
        Row(
            "Direct hand-offs",
            (
                _times(
                    "Prompts",
                    "cps",
                    "Computed instead: read both engines' logs; went into the pool: add decode engines.",
                    ("asked for", "sum(rate(vllm:kvlane_direct_landings_total))"),
                    ("came complete", "sum(rate(vllm:kvlane_direct_landed_total))"),
                    ("computed instead", "sum(rate(vllm:kvlane_direct_fallbacks_total))"),
                    ("went into the pool", "sum(rate(vllm:kvlane_direct_overflows_total))"),
                    ("not offered", "sum(rate(vllm:kvlane_direct_not_offered_total))"),
                ),
                _times(
                    "Time until a prompt is there",
                    "s",
                    "It includes the prefill; if it grows alone, the way between the engines is slow.",
                    (
                        "{{instance}}",
                        "sum by (instance) (rate(vllm:kvlane_direct_wait_seconds_total))"
                        " / sum by (instance) (rate(vllm:kvlane_direct_landings_total))",
                    ),
                ),
                _times(
                    "Bytes by way",
                    "Bps",
                    "GPU to GPU is fastest; sockets between engines of one host mean that a faster way failed.",
                    ("GPU to GPU", "sum(rate(vllm:kvlane_direct_cuda_bytes_total))"),
                    ("memory of this host", "sum(rate(vllm:kvlane_direct_cma_bytes_total))"),
                    ("sockets", "sum(rate(vllm:kvlane_direct_tcp_bytes_total))"),
                    stacked=True,
                ),
                _times(
                    "Reads that failed",
                    "cps",
                    "Some fail when a prefill engine ends; a steady rate points to the way between two engines.",
                    ("{{instance}}", "sum by (instance) (rate(vllm:kvlane_direct_failed_reads_total))"),
                    width=12,
                ),
                _times(
                    "Tokens",
                    "cps",
                    "Tokens loaded from the daemon did not have to come from the other engine.",
                    ("from other engines", "sum(rate(vllm:kvlane_direct_landed_tokens_total))"),
                    ("loaded from the daemon", "sum(rate(vllm:kvlane_direct_loaded_tokens_total))"),
                    ("through the pool", "sum(rate(vllm:kvlane_direct_overflowed_tokens_total))"),
                    width=12,
                ),
            ),
            is_folded=True,
        ),
    ),
)

_NODE: Final = '{node=~"$node"}'
_RANGE_REQUESTS: Final = "sum(increase(kvlane_route_requests_total[$__range]))"
_RANGE_ERRORS: Final = '(sum(increase(kvlane_route_requests_total{status=~"5.."}[$__range])) or vector(0))'

ROUTER: Final = Dashboard(
    "router",
    "kvlane: router",
    ("The router",),
    'job=~"$job", instance=~"$instance"',
    (
        Variable("job", 'label_values(up{job=~"(.*/)?kvlane-router"}, job)', "(.*/)?kvlane-router"),
        Variable("instance", 'label_values(up{job=~"$job"}, instance)'),
        Variable("node", 'label_values(kvlane_route_node_ready{job=~"$job", instance=~"$instance"}, node)'),
    ),
    (
        Row(
            "Does it pay?",
            (
                _stat(
                    "Routers",
                    "none",
                    "If fewer answer than are known, clients of the missing one get no answers: look at its log.",
                    ("answer", "sum(up)"),
                    ("known", "count(up)"),
                ),
                _stat(
                    "Engines",
                    "none",
                    "If fewer are ready than are known, `kvlane route list` says why; with none, clients get 503.",
                    ("ready", "sum(max by (node) (kvlane_route_node_ready))"),
                    ("known", "count(max by (node) (kvlane_route_node_ready))"),
                ),
                _stat(
                    "Answers with 5xx in this time",
                    "percentunit",
                    "Requests by status, by engine below, say where they come from; more than 5 % raise an alert.",
                    ("5xx", f"{_RANGE_ERRORS} / {_RANGE_REQUESTS}"),
                ),
                _stat(
                    "Requests refused in this time",
                    "none",
                    "No engine could serve the first kind, and all were overloaded for the second: add engines.",
                    ("no engine", "sum(increase(kvlane_route_refused_total[$__range]))"),
                    ("overload, 429", "sum(increase(kvlane_route_shed_total[$__range]))"),
                    alarm=True,
                ),
                _times(
                    "Requests by status",
                    "reqps",
                    "5xx come from engines that fail or are missing; at 499 the client left before its answer began.",
                    ("{{status}}", "sum by (status) (rate(kvlane_route_requests_total))"),
                    width=12,
                    stacked=True,
                ),
                _times(
                    "Prompt tokens expected in engines' caches",
                    "percentunit",
                    "The router chooses engines that have a prompt's beginning; if this falls, see its knowledge.",
                    (
                        "expected",
                        "sum(rate(kvlane_route_cached_tokens_total))"
                        " / sum(rate(kvlane_route_prompt_tokens_total))",
                    ),
                    width=12,
                ),
                _times(
                    "Time to the first token",
                    "s",
                    "If it grows with the requests on engines, add engines; if it grows alone, look at the hits.",
                    *_quantiles("kvlane_route_time_to_first_token_seconds"),
                ),
                _times(
                    "Time between tokens",
                    "s",
                    "It grows with the requests that engines run at once, and when prefills interrupt decodes.",
                    *_quantiles("kvlane_route_inter_token_latency_seconds"),
                ),
                _times(
                    "Refusals and retries",
                    "cps",
                    "Retries point to engines that fail: look at the engines below and at their logs.",
                    ("no engine", "sum(rate(kvlane_route_refused_total))"),
                    ("overload, 429", "sum(rate(kvlane_route_shed_total))"),
                    ("retries", "sum(rate(kvlane_route_retries_total))"),
                ),
            ),
        ),
        Row(
            "Engines",
            (
                _times(
                    "Requests on each engine",
                    "short",
                    "Engines of one role should be alike; one with far fewer requests is ejected, draining or slow.",
                    ("{{node}}", f"sum by (node) (kvlane_route_node_requests{_NODE})"),
                    ("{{node}}: others", f"max by (node) (kvlane_route_node_other_requests{_NODE})"),
                ),
                _times(
                    "Tokens to be prefilled on each engine",
                    "short",
                    "This is the queue before the first token; if all queues grow, add engines that prefill.",
                    ("{{node}}", f"sum by (node) (kvlane_route_node_prefill_tokens{_NODE})"),
                ),
                _times(
                    "KV cache that running requests use",
                    "percent",
                    "Near 100 % an engine preempts or queues requests: add engines, or shorten answers.",
                    ("{{node}}", f"max by (node) (kvlane_route_node_cache_used_percent{_NODE})"),
                ),
                _table(
                    "State of each engine",
                    "An engine that is open was ejected because it failed requests: its log says why.",
                    ("ready", f"max by (node, role) (kvlane_route_node_ready{_NODE})"),
                    ("open", f"max by (node, role) (kvlane_route_node_open{_NODE})"),
                    (
                        "hand-offs stopped",
                        f"max by (node, role) (kvlane_route_node_hand_offs_stopped{_NODE})",
                    ),
                    ("load known", f"max by (node, role) (kvlane_route_node_load_known{_NODE})"),
                ),
                _times(
                    "First tokens by engine, 95 %",
                    "s",
                    "One slow engine among fast ones has a problem of its own: look at its log and its GPU.",
                    (
                        "{{node}}",
                        "histogram_quantile(0.95, sum by (node, le)"
                        f" (rate(kvlane_route_time_to_first_token_seconds_bucket{_NODE})))",
                    ),
                    width=12,
                ),
            ),
        ),
        Row(
            "Requests",
            (
                _heatmap(
                    "First tokens",
                    "s",
                    "Two bands are hits and misses; the lower the second one lies, the less a miss costs.",
                    "sum by (le) (rate(kvlane_route_time_to_first_token_seconds_bucket))",
                ),
                _times(
                    "Time of whole requests",
                    "s",
                    "It grows with the length of answers; compare it with the time between tokens.",
                    *_quantiles("kvlane_route_request_duration_seconds"),
                ),
                _times(
                    "Tokens",
                    "cps",
                    "Prompt tokens that are not expected in a cache are what engines have to compute.",
                    ("prompts", "sum(rate(kvlane_route_prompt_tokens_total))"),
                    ("expected in a cache", "sum(rate(kvlane_route_cached_tokens_total))"),
                    ("answers", "sum(rate(kvlane_route_generated_tokens_total))"),
                ),
                _times(
                    "Requests by model",
                    "reqps",
                    "A model called `other` is one that no engine serves: clients ask for a wrong name.",
                    ("{{model}}", "sum by (model) (rate(kvlane_route_requests_total))"),
                    width=12,
                    stacked=True,
                ),
                _times(
                    "Answers with 5xx, and retries, by engine",
                    "cps",
                    "The engine with the most is the one whose log to read; an empty name is the router itself.",
                    (
                        "5xx: {{node}}",
                        'sum by (node) (rate(kvlane_route_requests_total{node=~"$node", status=~"5.."}))',
                    ),
                    ("retries: {{node}}", f"sum by (node) (rate(kvlane_route_retries_total{_NODE}))"),
                    width=12,
                ),
            ),
        ),
        Row(
            "Pairs of prefill and decode engines",
            (
                _times(
                    "Prompts that pairs did not share",
                    "cps",
                    "Prompts that are not handed over are computed twice: read the prefill engines' logs.",
                    ("not handed over", "sum(rate(kvlane_route_not_handed_over_total))"),
                    ("another role", "sum(rate(kvlane_route_other_role_total))"),
                    ("cut short", "sum(rate(kvlane_route_left_total))"),
                ),
                _times(
                    "How loaded each role is",
                    "none",
                    "With --balance engines change to the more loaded role; if both are loaded, add engines.",
                    (
                        "{{group}} {{model}} {{role}}",
                        "max by (group, model, role) (kvlane_route_balance_score)",
                    ),
                ),
                _times(
                    "Changes of roles",
                    "cps",
                    "If roles change often, the work swings faster than engines follow; wanted engines are advice.",
                    ("roles changed", "sum(rate(kvlane_route_role_changes_total))"),
                    ("wanted: {{direction}}", "sum by (direction) (rate(kvlane_route_scale_wanted_total))"),
                ),
            ),
            is_folded=True,
        ),
        Row(
            "What the router knows of prompts",
            (
                _table(
                    "How each engine's blocks are known",
                    "Approximate means from requests only; the reason says what to set so that KV events are used.",
                    (
                        "routers",
                        f"sum by (node, knowledge, reason) (kvlane_route_node_knowledge{_NODE})",
                    ),
                    width=8,
                ),
                _times(
                    "Lost events and restarts",
                    "cps",
                    "The router forgets an engine's blocks after lost events; a steady rate points to the network.",
                    ("events lost", "sum(rate(kvlane_route_node_events_lost_total))"),
                    ("restarts", "sum(rate(kvlane_route_node_restarts_total))"),
                    ("blocks ignored", "sum(rate(kvlane_route_node_blocks_unattached_total))"),
                    (
                        "known by text: {{reason}}",
                        "sum by (reason) (rate(kvlane_route_knowledge_fallbacks_total))",
                    ),
                ),
                _times(
                    "Memory of indexes and requests",
                    "bytes",
                    "Each is bounded; requests that stay high without traffic are a leak to report.",
                    ("prefixes", "sum(kvlane_route_index_bytes)"),
                    ("reported blocks", "sum(kvlane_route_blocks_bytes)"),
                    ("requests", "sum(kvlane_route_body_bytes)"),
                ),
            ),
        ),
        Row(
            "Connections, names and process",
            (
                _times(
                    "Clients' connections",
                    "short",
                    "Near the limit the router closes idle ones for new ones; then raise --max-connections.",
                    ("{{instance}}", "sum by (instance) (kvlane_route_connections)"),
                    width=12,
                ),
                _times(
                    "Refused beats and failed names",
                    "cps",
                    "An engine whose beats are refused does not join: the router's log has the reason.",
                    ("beats: {{reason}}", "sum by (reason) (rate(kvlane_route_beats_refused_total))"),
                    ("DNS names", "sum(rate(kvlane_route_names_failed_total))"),
                    ("connections displaced", "sum(rate(kvlane_route_connections_displaced_total))"),
                    width=12,
                ),
                *_process(),
            ),
        ),
    ),
)

DASHBOARDS: Final = (DAEMON, ENGINE, ROUTER)
