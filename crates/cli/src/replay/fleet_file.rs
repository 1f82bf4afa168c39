//! The file of `kvlane replay --route`: engines, the router before them, and the loads to replay.

use std::{collections::HashMap, fs, path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use kvlane_fleet::{Class, Costs, Limits, NodeSetup, PoolSetup, Setup, Signals, TransferSetup};
use kvlane_policy::PolicyKind;
use kvlane_router::schedule::{Policy, Role, SchedulerSettings};
use serde::Deserialize;

use super::pool_table::{PoolTable, pools};
use crate::balance_table::BalanceTable;

/// Most nodes of a fleet.
const NODES_MAX: usize = 4096;

/// A fleet file, read and checked.
#[derive(Debug)]
pub(super) struct FleetFile {
    /// The setup with the first policy, at the recorded speed.
    pub(super) setup: Setup,
    pub(super) policies: Vec<Policy>,
    /// Loads, as shares of the fleet's capacity.
    pub(super) loads: Vec<f64>,
    /// Replaces loads: factors on the recorded speed.
    pub(super) speeds: Vec<f64>,
    pub(super) limits: Limits,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct File {
    policies: Vec<String>,
    loads: Vec<f64>,
    speeds: Vec<f64>,
    seed: u64,
    short_tokens: u64,
    ttft_ms: f64,
    tpot_ms: f64,
    class: Vec<ClassTable>,
    pool: Vec<PoolTable>,
    node: Vec<NodeTable>,
    hand_over: HandOverTable,
    signals: SignalsTable,
    balance: Option<BalanceTable>,
}

impl Default for File {
    fn default() -> Self {
        Self {
            policies: Policy::ALL.map(|policy| policy.name().to_owned()).to_vec(),
            loads: vec![0.3, 0.5, 0.7, 0.8, 0.9, 0.95],
            speeds: Vec::new(),
            seed: 0,
            short_tokens: SchedulerSettings::default().short_tokens,
            ttft_ms: 2000.0,
            tpot_ms: 50.0,
            class: Vec::new(),
            pool: Vec::new(),
            node: Vec::new(),
            hand_over: HandOverTable::default(),
            signals: SignalsTable::default(),
            balance: None,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ClassTable {
    name: String,
    /// A file of bench/gpu/steps.py with times of steps; without it those of an H100.
    steps: Option<String>,
    /// Factors on these times: this one for prompts, the next for further tokens.
    prefill_times: Option<f64>,
    decode_times: Option<f64>,
    kv_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    eviction: Option<String>,
    requests_max: Option<usize>,
    step_tokens: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct NodeTable {
    #[serde(default = "worker")]
    role: String,
    #[serde(default = "one")]
    count: usize,
    class: Option<String>,
    host: Option<String>,
    pool: Option<String>,
    dies_s: Option<f64>,
    returns_s: Option<f64>,
    joins_s: Option<f64>,
    drains_s: Option<f64>,
}

fn worker() -> String {
    Role::Worker.name().to_owned()
}

fn one() -> usize {
    1
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct HandOverTable {
    base_ms: f64,
    token_ms: f64,
    far_token_ms: Option<f64>,
}

impl Default for HandOverTable {
    fn default() -> Self {
        let TransferSetup { base_ms, token_ms, far_token_ms } = TransferSetup::default();
        Self { base_ms, token_ms, far_token_ms }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct SignalsTable {
    every_ms: f64,
    late_ms: f64,
    lost_percent: u8,
    death_ms: f64,
    kv_events: bool,
}

impl Default for SignalsTable {
    fn default() -> Self {
        let Signals { every, late, lost_percent, death, kv_events } = Signals::default();
        let [every_ms, late_ms, death_ms] = [every, late, death].map(|time| time.as_secs_f64() * 1e3);
        Self { every_ms, late_ms, lost_percent, death_ms, kv_events }
    }
}

/// Reads the file. An error names the key of the mistake.
pub(super) fn read(path: &Path) -> Result<FleetFile> {
    let place = || format!("--route '{}'", path.display());
    let text = fs::read_to_string(path).with_context(place)?;
    parse(&text, path.parent().unwrap_or(Path::new("."))).with_context(place)
}

/// Parses the file. Paths in it are relative to `folder`.
fn parse(text: &str, folder: &Path) -> Result<FleetFile> {
    let file: File = toml::from_str(text).map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        anyhow!("line {}: {}", before.matches('\n').count() + 1, error.message().replace('\n', ", "))
    })?;
    let policies =
        file.policies.iter().map(|name| name.parse().map_err(|error| anyhow!("policies: {error}")));
    let policies: Vec<Policy> = policies.collect::<Result<_>>()?;
    let [Some(first), ..] = policies[..].first_chunk::<1>().map_or([None], |first| [Some(first[0])]) else {
        bail!("policies = []: name one at least");
    };
    if file.loads.is_empty() {
        bail!("loads = []: name one at least");
    }
    if let Some(load) = file.loads.iter().find(|load| !(0.001..=10.0).contains(*load)) {
        bail!("loads: {load} is no share of what the fleet can serve; 0.8 is one");
    }
    if let Some(speed) = file.speeds.iter().find(|speed| !(0.001..=1000.0).contains(*speed)) {
        bail!("speeds: {speed} times as fast as recorded is not from 0.001 to 1000");
    }
    let pools = pools(file.pool)?;
    let setup = Setup {
        nodes: nodes(file.node, &classes(file.class, folder)?, &pools)?,
        pools,
        scheduler: SchedulerSettings {
            policy: first,
            decode_policy: first,
            short_tokens: file.short_tokens,
            seed: file.seed,
            ..SchedulerSettings::default()
        },
        speed: 1.0,
        transfer: TransferSetup {
            base_ms: number("hand-over.base-ms", file.hand_over.base_ms)?,
            token_ms: number("hand-over.token-ms", file.hand_over.token_ms)?,
            far_token_ms: file
                .hand_over
                .far_token_ms
                .map(|ms| number("hand-over.far-token-ms", ms))
                .transpose()?,
        },
        signals: Signals {
            every: time("signals.every-ms", file.signals.every_ms)?,
            late: time("signals.late-ms", file.signals.late_ms)?,
            lost_percent: file.signals.lost_percent.min(100),
            death: time("signals.death-ms", file.signals.death_ms)?,
            kv_events: file.signals.kv_events,
        },
        balance: file.balance.map(|table| table.settings()).transpose()?,
    };
    let limits = Limits { ttft: time("ttft-ms", file.ttft_ms)?, tpot: time("tpot-ms", file.tpot_ms)? };
    Ok(FleetFile { setup, policies, loads: file.loads, speeds: file.speeds, limits })
}

fn classes(tables: Vec<ClassTable>, folder: &Path) -> Result<HashMap<String, Arc<Class>>> {
    let mut classes = HashMap::new();
    for table in tables {
        let place = || format!("[[class]] {:?}", table.name);
        let usual = Class::default();
        let costs = match &table.steps {
            None => usual.costs,
            Some(steps) => {
                let path = folder.join(steps);
                let json = fs::read_to_string(&path).with_context(|| format!("steps = {steps:?}"));
                let json = json.with_context(place)?;
                Costs::from_steps(&json).with_context(|| format!("steps = {steps:?}")).with_context(place)?
            }
        };
        let times = |key: &str, value: Option<f64>| match value.unwrap_or(1.0) {
            times if (0.001..=1000.0).contains(&times) => Ok(times),
            times => Err(anyhow!("{key} = {times}: from 0.001 to 1000")),
        };
        let prefill = times("prefill-times", table.prefill_times).with_context(place)?;
        let decode = times("decode-times", table.decode_times).with_context(place)?;
        let costs = costs.times(prefill, decode);
        let eviction: Result<PolicyKind> = table
            .eviction
            .as_ref()
            .map_or(Ok(usual.eviction), |name| name.parse().map_err(|error| anyhow!("eviction: {error}")));
        let class = Class {
            name: table.name.clone(),
            costs,
            kv_tokens: table.kv_tokens.unwrap_or(usual.kv_tokens),
            cached_tokens: table.cached_tokens.unwrap_or(usual.cached_tokens),
            eviction: eviction.with_context(place)?,
            requests_max: table.requests_max.unwrap_or(usual.requests_max),
            step_tokens: table.step_tokens.unwrap_or(usual.step_tokens),
        };
        if class.requests_max == 0 || class.step_tokens == 0 || class.kv_tokens == 0 {
            bail!("{}: requests-max, step-tokens and kv-tokens have to be at least 1", place());
        }
        if classes.insert(table.name.clone(), Arc::new(class)).is_some() {
            bail!("{} is there twice", place());
        }
    }
    Ok(classes)
}

fn nodes(
    tables: Vec<NodeTable>,
    classes: &HashMap<String, Arc<Class>>,
    pools: &[PoolSetup],
) -> Result<Vec<NodeSetup>> {
    let mut nodes = Vec::new();
    let usual = Arc::new(Class::default());
    for (index, table) in tables.iter().enumerate() {
        let place = || format!("[[node]] number {}", index + 1);
        let role: Role = table.role.parse().map_err(|error: String| anyhow!(error)).with_context(place)?;
        let class = match (&table.class, classes.len()) {
            (Some(name), _) => classes.get(name).with_context(|| {
                format!("{}: class = {name:?}: there is no [[class]] of that name", place())
            })?,
            (None, 0) => &usual,
            (None, 1) => classes.values().next().unwrap_or(&usual),
            (None, _) => bail!("{}: say which class it is of", place()),
        };
        let seconds = |key: &str, value: Option<f64>| {
            value.map(|value| number(key, value).map(Duration::from_secs_f64)).transpose().with_context(place)
        };
        let at = seconds("dies-s", table.dies_s)?;
        let back = seconds("returns-s", table.returns_s)?;
        if back.is_some_and(|back| at.is_none_or(|at| back < at)) {
            bail!("{}: returns-s without an earlier dies-s", place());
        }
        let dies = at.map(|at| (at, back.map(|back| back - at)));
        let (joins, drains) = (seconds("joins-s", table.joins_s)?, seconds("drains-s", table.drains_s)?);
        let goes = [at, drains].into_iter().flatten().min();
        if joins.is_some_and(|joins| goes.is_some_and(|goes| goes <= joins)) {
            bail!("{}: joins-s has to be before dies-s and drains-s", place());
        }
        let host = table.host.clone().unwrap_or_default();
        let pool = table.pool.as_ref().map(|name| {
            let number = pools.iter().position(|pool| pool.name == *name);
            number.with_context(|| format!("{}: pool = {name:?}: there is no [[pool]] of that name", place()))
        });
        let pool = pool.transpose()?;
        let node = NodeSetup { host, pool, dies, joins, drains, ..NodeSetup::new(role, Arc::clone(class)) };
        if nodes.len() + table.count > NODES_MAX {
            bail!("{}: more than {NODES_MAX} nodes", place());
        }
        nodes.extend(std::iter::repeat_n(node, table.count));
    }
    if tables.is_empty() {
        let class = classes.values().next().unwrap_or(&usual);
        let node = NodeSetup::new(Role::Worker, Arc::clone(class));
        nodes.extend(std::iter::repeat_n(node, 8));
    }
    if nodes.is_empty() {
        bail!("[[node]]: there is none");
    }
    Ok(nodes)
}

fn time(key: &str, milliseconds: f64) -> Result<Duration> {
    Ok(Duration::from_secs_f64(number(key, milliseconds)? / 1e3))
}

/// At least 0, and at most a year.
fn number(key: &str, value: f64) -> Result<f64> {
    if !(0.0..=3.2e10).contains(&value) {
        bail!("{key} = {value}: at least 0, and no longer than a year");
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<FleetFile> {
        parse(text, Path::new("."))
    }

    #[test]
    fn an_empty_file_is_eight_workers_and_all_policies() {
        let file = parsed("").unwrap();
        assert_eq!(file.setup.nodes.len(), 8);
        assert!(file.setup.nodes.iter().all(|node| node.role == Role::Worker));
        assert_eq!(file.policies, Policy::ALL);
    }

    #[test]
    fn nodes_have_classes_and_deaths() {
        let text = "
            policies = [\"least-work\"]
            [[class]]
            name = \"big\"
            kv-tokens = 7
            [[class]]
            name = \"small\"
            step-tokens = 9
            [[node]]
            role = \"prefill\"
            count = 3
            class = \"big\"
            [[node]]
            role = \"decode\"
            class = \"small\"
            dies-s = 10.5
            returns-s = 12
            joins-s = 3
            drains-s = 60
            pool = \"host\"
            [[pool]]
            name = \"host\"
            tokens = 9000
            told = false
        ";
        let setup = parsed(text).unwrap().setup;
        let pool =
            PoolSetup { name: "host".into(), tokens: 9000, is_reported: false, ..PoolSetup::default() };
        assert_eq!(setup.pools, [pool]);
        let nodes = setup.nodes;
        assert_eq!((nodes[2].pool, nodes[3].pool), (None, Some(0)));
        assert_eq!(nodes.len(), 4);
        assert_eq!((nodes[2].role, nodes[2].class.kv_tokens), (Role::Prefill, 7));
        assert_eq!((nodes[3].role, nodes[3].class.step_tokens), (Role::Decode, 9));
        assert_eq!(nodes[3].dies, Some((Duration::from_millis(10_500), Some(Duration::from_millis(1500)))));
        assert_eq!([nodes[3].joins, nodes[3].drains], [3, 60].map(|at| Some(Duration::from_secs(at))));
        assert_eq!((nodes[0].joins, nodes[0].drains), (None, None));
    }

    #[test]
    fn mistakes_are_told_with_their_key() {
        for (text, wanted) in [
            ("policies = [\"best\"]", "policies: best is no policy; choose one of random"),
            ("policies = []", "policies = []"),
            ("loads = []", "loads = []"),
            ("loads = [80]", "loads: 80 is no share"),
            ("loads = [nan]", "loads: NaN is no share"),
            ("seed = -1", "line 1: "),
            ("\nsize = 3", "line 2: unknown field `size`"),
            ("ttft-ms = -5", "ttft-ms = -5: at least 0"),
            ("ttft-ms = inf", "ttft-ms = inf: at least 0"),
            ("[[node]]\nrole = \"king\"", "king is no role"),
            ("[[node]]\nclass = \"x\"", "class = \"x\": there is no [[class]]"),
            ("[[node]]\npool = \"x\"", "number 1: pool = \"x\": there is no [[pool]]"),
            ("[[pool]]\nname = \"x\"\n[[pool]]\nname = \"x\"", "[[pool]] \"x\" is there twice"),
            ("[[pool]]\nname = \"x\"\nload-token-ms = -1", "[[pool]] \"x\": load-token-ms = -1"),
            ("[[pool]]\nname = \"x\"\ntokens = 0", "[[pool]] \"x\": tokens = 0"),
            ("[[node]]\ncount = 5000", "more than 4096 nodes"),
            ("[[node]]\ncount = 0", "[[node]]: there is none"),
            ("[[node]]\nreturns-s = 3", "returns-s without an earlier dies-s"),
            ("[[node]]\njoins-s = 3\ndrains-s = 2", "number 1: joins-s has to be before dies-s and drains-s"),
            ("[[node]]\njoins-s = -3", "joins-s = -3: at least 0"),
            ("[[class]]\nname = \"a\"\n[[class]]\nname = \"a\"", "\"a\" is there twice"),
            ("[[class]]\nname = \"a\"\nstep-tokens = 0", "step-tokens"),
            ("[[class]]\nname = \"a\"\neviction = \"mru\"", "eviction: "),
            ("[[class]]\nname = \"a\"\nsteps = \"nowhere.json\"", "steps = \"nowhere.json\""),
            ("[hand-over]\nbase-ms = -1", "hand-over.base-ms = -1"),
            ("[hand-over]\nfar-token-ms = nan", "hand-over.far-token-ms = NaN"),
            ("[signals]\nlate-ms = 1e30", "signals.late-ms"),
        ] {
            let told = format!("{:#}", parsed(text).unwrap_err());
            assert!(told.contains(wanted), "{text}: {told}");
        }
    }
}
