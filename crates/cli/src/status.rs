//! `kvlane status`.

use std::{
    collections::BTreeSet,
    env,
    io::{IsTerminal, Write},
    time::Duration,
};

use anyhow::{Result, anyhow};
use bytesize::ByteSize;
use clap::Args;
use kvlane_client::{DaemonUser, Tool, default_address};
use kvlane_proto::{
    Address,
    v1::{LearntKind, MemberStatus, SessionStatus, ShadowHitRatio, Status},
};
use serde_json::json;

use crate::errors::sentence;

/// Printed for a namespace whose blocks are only on the SSD. The daemon has no name for it, because no engine has reported one
/// since the daemon started.
pub(crate) const ONLY_ON_THE_SSD: &str = "(only on the SSD)";

/// Printed if there are several namespaces, because a user may wonder why engines do not share.
const SHARING: &str = "\nEngines share blocks only within a namespace: the same model and revision, dtype and tokens a \
                       block. docs/identity.md says what else counts.\n";

/// The flags that find the daemon.
#[derive(Debug, Args)]
pub(crate) struct DaemonArgs {
    /// The daemon's address: unix:PATH, PATH or HOST:PORT [default: kvlane.sock in the user's runtime directory]
    #[arg(long, alias = "listen", env = "KVLANE_ADDR", value_name = "ADDRESS")]
    addr: Option<String>,
    /// A further user, by name or number, who may run the daemon beside you and root. Daemons of others are refused
    #[arg(long, env = "KVLANE_DAEMON_USER", value_name = "USER", value_parser = parse_user)]
    daemon_user: Option<DaemonUser>,
}

impl DaemonArgs {
    /// The address that was given, else the default one.
    pub(crate) fn address(&self) -> Result<Address> {
        match &self.addr {
            Some(text) => text.parse().map_err(|error| anyhow!("{} {error}", address_source())),
            None => Ok(default_address()),
        }
    }

    /// The user who may run the daemon, beside this process's user and root.
    pub(crate) fn user(&self) -> DaemonUser {
        self.daemon_user.unwrap_or_default()
    }

    /// Connects. The error says what to do.
    pub(crate) fn connect(&self) -> Result<Tool> {
        Ok(Tool::connect_to_user(&self.address()?, self.user(), Duration::from_secs(2))?)
    }
}

/// The name of the source of a wrong address: the flag if it was given, else the variable.
fn address_source() -> &'static str {
    let is_flag = |text: String| text.starts_with("--addr") || text.starts_with("--listen");
    let given = env::args_os().any(|argument| argument.into_string().is_ok_and(is_flag));
    if given { "--addr" } else { "KVLANE_ADDR" }
}

/// The error leaves out the value, which clap's message has.
fn parse_user(text: &str) -> Result<DaemonUser, String> {
    text.parse()
        .map_err(|_| "this host has no such user: give the name or the number of who runs the daemon".into())
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON; with --watch a line each time
    #[arg(long)]
    json: bool,
    /// Print it again every so many seconds, with the hits since the time before, until Ctrl-C
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = parse_interval)]
    watch: Option<Duration>,
}

/// Shortest interval of `--watch`.
const INTERVAL_MIN: f64 = 0.1;

fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (INTERVAL_MIN..=86_400.0).contains(seconds));
    let seconds =
        seconds.ok_or_else(|| format!("write a number of seconds, from {INTERVAL_MIN} to 86400"))?;
    Ok(Duration::from_secs_f64(seconds))
}

/// Prints what the daemon holds and who uses it.
pub(crate) fn run(args: &StatusArgs) -> Result<()> {
    if let Some(interval) = args.watch {
        return watch(args, interval);
    }
    let status = args.daemon.connect()?.status()?;
    if args.json {
        println!("{:#}", to_json(&status));
    } else {
        print!("{}", to_text(&status));
    }
    Ok(())
}

/// Prints the status again and again, until the reader of a pipe leaves. While no daemon answers it says so.
fn watch(args: &StatusArgs, interval: Duration) -> Result<()> {
    let mut tool = Some(args.daemon.connect()?);
    let mut before = None;
    loop {
        let answer = match &mut tool {
            Some(tool) => tool.status().map_err(anyhow::Error::from),
            None => args.daemon.connect().and_then(|mut connected| {
                let status = connected.status()?;
                tool = Some(connected);
                Ok(status)
            }),
        };
        let text = match answer {
            Ok(status) if args.json => format!("{}\n", to_json(&status)),
            Ok(status) => {
                let hits: u64 = status.namespaces.iter().map(|n| n.hit_blocks).sum();
                let missed: u64 = status.namespaces.iter().map(|n| n.missed_blocks).sum();
                let asked = (hits, hits + missed);
                // A partial status has no namespaces.
                let since =
                    if status.is_partial { String::new() } else { since(before.replace(asked), asked) };
                format!("{}{since}{}", clear(), to_text(&status))
            }
            Err(error) => {
                (tool, before) = (None, None);
                if args.json {
                    format!("{}\n", json!({ "error": sentence(&error) }))
                } else {
                    format!("{}{}\n", clear(), sentence(&error))
                }
            }
        };
        let mut out = std::io::stdout().lock();
        if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
            return Ok(());
        }
        drop(out);
        std::thread::sleep(interval);
    }
}

/// Clears a terminal; an empty line elsewhere.
fn clear() -> &'static str {
    if std::io::stdout().is_terminal() { "\x1b[H\x1b[2J\x1b[3J" } else { "\n" }
}

/// The hits since the time before, by (hits, references) of both times. Empty the first time, and for another daemon.
fn since(before: Option<(u64, u64)>, now: (u64, u64)) -> String {
    let Some((hits, references)) = before.filter(|before| before.0 <= now.0 && before.1 <= now.1) else {
        return String::new();
    };
    match (now.0 - hits, now.1 - references) {
        (_, 0) => "since the last time: nothing was looked up\n\n".into(),
        (hits, references) => format!(
            "since the last time: {hits} of {references} looked-up blocks were hits ({:.1} %)\n\n",
            100.0 * hits as f64 / references as f64
        ),
    }
}

/// A session that is silent for longer counts as idle. The sessions of an engine that computes send something every 10 s.
const IDLE_MS: u64 = 15_000;

/// A session's state, for people and for programs.
fn state(session: &SessionStatus) -> (String, &'static str) {
    let seconds = session.silent_ms as f64 / 1e3;
    if session.role.ends_with("(lost)") {
        (format!("lost, heard {} ago", duration(seconds)), "lost")
    } else if session.silent_ms < IDLE_MS {
        (format!("heard {} ago", duration(seconds)), "active")
    } else {
        (format!("idle for {}", duration(seconds)), "idle")
    }
}

/// "1.5 s", "20 min", "2.5 h".
fn duration(seconds: f64) -> String {
    match seconds {
        ..60.0 => format!("{seconds:.1} s"),
        60.0..3600.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

/// 16 bytes as 32 digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn to_json(status: &Status) -> serde_json::Value {
    json!({
        "version": status.version,
        "uptime_seconds": status.uptime_ms as f64 / 1e3,
        "pool_bytes": status.pool_bytes,
        "used_bytes": status.used_bytes,
        "page_size": status.page_size,
        "blocks": status.blocks,
        "leased_blocks": status.leased_blocks,
        "claimed_blocks": status.claimed_blocks,
        "ssd_blocks": status.ssd_blocks,
        "is_partial": status.is_partial,
        "policy": status.policy,
        "active_policy": status.active_policy,
        "shadow_hit_ratios": status.shadow_hit_ratios.iter().map(|s| (s.policy.clone(), s.hit_ratio.into()))
            .collect::<serde_json::Map<_, _>>(),
        "not_admitted_blocks": status.not_admitted_blocks,
        "learnt": status.learnt.iter().map(|kind| json!({
            "blocks": kind.blocks, "seen": kind.seen,
            "density_by_age": kind.ages.iter().zip(&kind.hit_densities).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
        "ssds": status.ssds.iter().map(|s| json!({
            "path": s.path, "capacity_bytes": s.capacity_bytes, "used_bytes": s.used_bytes, "method": s.method,
            "trouble": s.trouble, "transfer_path": s.transfer_path, "path_reason": s.path_reason,
            "direct_bytes_per_second": s.direct_bytes_per_second,
            "staged_bytes_per_second": s.staged_bytes_per_second, "staging_bytes": s.staging_bytes,
        })).collect::<Vec<_>>(),
        "cluster": status.cluster.as_ref().map(|c| json!({
            "members": c.members.iter().map(|m| json!({
                "address": m.address, "name": m.name, "version": m.software, "is_reached": m.is_reached,
                "round_trip_us": m.round_trip_us, "trouble": m.trouble,
            })).collect::<Vec<_>>(),
            "replicas": c.replicas.iter().map(|r| json!({
                "address": r.address, "name": r.name, "version": r.software, "is_reached": r.is_reached,
                "round_trip_us": r.round_trip_us, "trouble": r.trouble,
            })).collect::<Vec<_>>(),
            "announced_blocks": c.announced_blocks,
            "unresolved": c.unresolved, "fetched_blocks": c.fetched_blocks, "fetched_bytes": c.fetched_bytes,
            "failed_blocks": c.failed_blocks, "damaged_blocks": c.damaged_blocks, "lent_blocks": c.lent_blocks,
            "lent_bytes": c.lent_bytes, "lent_bytes_now": c.lent_bytes_now, "refused_loans": c.refused_loans,
            "expired_loans": c.expired_loans, "strangers": c.strangers,
        })),
        "sessions": status.sessions.iter().map(|s| json!({
            "session": s.session_id, "engine": s.engine_id, "role": s.role, "pid": s.pid, "client": s.client,
            "silent_seconds": s.silent_ms as f64 / 1e3, "state": state(s).1, "save_method": s.method, "save_method_reason": s.reason,
        })).collect::<Vec<_>>(),
        "namespaces": status.namespaces.iter().map(|n| json!({
            "namespace": hex(&n.namespace), "name": n.name, "shards": n.shards, "blocks": n.blocks,
            "bytes": n.bytes, "hit_blocks": n.hit_blocks, "missed_blocks": n.missed_blocks,
            "ssd_blocks": n.ssd_blocks, "ssd_bytes": n.ssd_bytes, "layout": n.layout,
        })).collect::<Vec<_>>(),
    })
}

fn to_text(status: &Status) -> String {
    let size = |bytes| ByteSize::b(bytes).display().si().to_string();
    let share = 100.0 * status.used_bytes as f64 / (status.pool_bytes.max(1)) as f64;
    let mut text = format!(
        "kvlane {}, up {:.0} s\npool        {} of {} used ({share:.1} %), {} pages\nblocks      {}, {} leased, {} being saved\n",
        status.version,
        status.uptime_ms as f64 / 1e3,
        size(status.used_bytes),
        size(status.pool_bytes),
        status.page_size,
        status.blocks,
        status.leased_blocks,
        status.claimed_blocks,
    );
    text.push_str(&format!("policy      {}\n", policy(status)));
    if !status.ssds.is_empty() {
        text.push_str(&format!("ssd         {} blocks\n", status.ssd_blocks));
        let rows = status.ssds.iter().map(|s| {
            let used = format!("{} of {}", size(s.used_bytes), size(s.capacity_bytes));
            let trouble = if s.trouble.is_empty() { "none" } else { &s.trouble };
            [s.path.clone(), used, s.method.clone(), trouble.to_owned()]
        });
        text.push_str(&table(&["file", "used", "by", "trouble"], rows));
    }
    text.push_str(&cluster(status));
    text.push_str(&learnt(status));
    if status.is_partial {
        text.push_str("\nSessions, namespaces and what was learnt are told over the Unix socket only.\n");
        return text;
    }
    text.push_str("\nsessions\n");
    let rows = status.sessions.iter().map(|s| {
        [
            s.session_id.to_string(),
            s.role.clone(),
            s.engine_id.clone(),
            s.pid.to_string(),
            state(s).0,
            s.method.clone(),
            s.client.clone(),
        ]
    });
    text.push_str(&table(&["id", "role", "engine", "pid", "state", "saves by", "client"], rows));
    text.push_str("\nnamespaces\n");
    let rows = status.namespaces.iter().map(|n| {
        let asked = n.hit_blocks + n.missed_blocks;
        let rate = if asked == 0 {
            "-".into()
        } else {
            format!("{:.1} %", 100.0 * n.hit_blocks as f64 / asked as f64)
        };
        let name =
            if n.blocks == 0 && n.name.is_empty() { ONLY_ON_THE_SSD.to_owned() } else { n.name.clone() };
        [
            hex(&n.namespace),
            n.shards.to_string(),
            n.blocks.to_string(),
            size(n.bytes),
            n.ssd_blocks.to_string(),
            size(n.ssd_bytes),
            rate,
            name,
        ]
    });
    let head = ["namespace", "shards", "blocks", "size", "on SSD", "size", "hit rate", "name"];
    text.push_str(&table(&head, rows));
    let namespaces: BTreeSet<_> = status.namespaces.iter().map(|n| &n.namespace).collect();
    if namespaces.len() > 1 {
        text.push_str(SHARING);
    }
    text.push_str(&layouts(status));
    text
}

/// The other daemons and the replicas of the index; empty without `--peers` and `--index`.
fn cluster(status: &Status) -> String {
    let Some(cluster) = &status.cluster else { return String::new() };
    let size = |bytes| ByteSize::b(bytes).display().si().to_string();
    let mut text = format!(
        "cluster     {} blocks ({}) came from others, {} did not come, {} were damaged; {} ({}) lent\n",
        cluster.fetched_blocks,
        size(cluster.fetched_bytes),
        cluster.failed_blocks,
        cluster.damaged_blocks,
        cluster.lent_blocks,
        size(cluster.lent_bytes),
    );
    let row = |member: &MemberStatus| {
        let state = match (member.is_reached, member.round_trip_us) {
            (false, _) => "not reached".to_owned(),
            (true, 0) => "reached".to_owned(),
            (true, us) => format!("reached, answers in {us} us"),
        };
        let trouble = if member.trouble.is_empty() { "none" } else { &member.trouble };
        [member.address.clone(), member.name.clone(), state, trouble.to_owned()]
    };
    text.push_str(&table(&["daemon", "name", "state", "trouble"], cluster.members.iter().map(row)));
    let flag = if cluster.replicas.is_empty() {
        "--peers"
    } else {
        text.push_str(&format!("index       knows {} blocks of this daemon\n", cluster.announced_blocks));
        text.push_str(&table(&["replica", "name", "state", "trouble"], cluster.replicas.iter().map(row)));
        "--index"
    };
    for name in &cluster.unresolved {
        text.push_str(&format!("  {flag} {name}\n"));
    }
    if cluster.strangers > 0 {
        text.push_str(&format!(
            "  {} messages of daemons that --peers does not name: write the same --peers everywhere\n",
            cluster.strangers
        ));
    }
    text
}

/// The layouts of namespaces that have several; empty without any.
fn layouts(status: &Status) -> String {
    let named = || status.namespaces.iter().filter(|n| !n.layout.is_empty());
    let several = named().filter(|n| named().filter(|other| other.namespace == n.namespace).count() > 1);
    let rows: Vec<_> = several.map(|n| [hex(&n.namespace), n.shards.to_string(), n.layout.clone()]).collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = ["namespace", "shards", "layout"];
    format!(
        "\nIn one namespace engines share blocks only if their layouts are equal.\n{}",
        table(&head, rows.into_iter())
    )
}

/// "lru", or "auto, now arc; 7 blocks were not let in" and a line with the hits of the shadow caches. Empty if the daemon does
/// not report its policy.
fn policy(status: &Status) -> String {
    let mut text = status.policy.clone();
    if status.policy != status.active_policy {
        text.push_str(&format!(", now {}", status.active_policy));
    }
    let hits = |shadow: &ShadowHitRatio| format!("{} {:.1} %", shadow.policy, 100.0 * shadow.hit_ratio);
    if status.not_admitted_blocks > 0 {
        text.push_str(&format!("; {} blocks were not let in", status.not_admitted_blocks));
    }
    let shadows: Vec<String> = status.shadow_hit_ratios.iter().map(hits).collect();
    if !shadows.is_empty() {
        text.push_str(&format!("\n            of the pool alone shadow caches hit: {}", shadows.join(", ")));
    }
    text
}

/// Most kinds of blocks that are shown.
const KINDS_SHOWN: usize = 8;
/// References for which hits are counted: many, so that the smallest number is readable.
const REFERENCES: f64 = 1e6;

/// The policy's knowledge of the kinds of blocks that it has seen most; empty for a policy that does not learn.
fn learnt(status: &Status) -> String {
    if status.learnt.is_empty() {
        return String::new();
    }
    let density = |kind: &LearntKind, age: u64| {
        let next = kind.ages.partition_point(|first| *first <= age);
        let density = kind.hit_densities.get(next.saturating_sub(1)).copied().unwrap_or(0.0);
        three_figures(REFERENCES * density)
    };
    // A full pool evicts a block without a hit after about as many references as the pool has blocks.
    let blocks = status.blocks.max(10);
    let ages = [0, blocks / 10, blocks];
    let rows = status.learnt.iter().take(KINDS_SHOWN).map(|kind| {
        let [new, young, old] = ages.map(|age| density(kind, age));
        [kind.blocks.clone(), format!("{:.0}", kind.seen), new, young, old]
    });
    let heads = ages.map(|age| if age == 0 { "new".to_owned() } else { format!("{age} old") });
    let head = ["blocks", "seen", &heads[0], &heads[1], &heads[2]];
    format!(
        "\nlearnt: hits that a block brings in a million block references, by its age in references\n{}",
        table(&head, rows)
    )
}

/// "1250", "12.5", "0.125", "0.00125".
fn three_figures(number: f64) -> String {
    let above_one = if number > 0.0 { number.log10().floor() as i32 } else { 2 };
    format!("{number:.*}", (2 - above_one).clamp(0, 8) as usize)
}

/// Columns as wide as their widest cell.
fn table<const N: usize>(head: &[&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let rows: Vec<[String; N]> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
    let widths: [usize; N] =
        std::array::from_fn(|c| rows.iter().map(|row| row[c].chars().count()).max().unwrap_or(0));
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(&format!("  {}\n", cells.join("  ").trim_end()));
    }
    text
}

#[cfg(test)]
mod tests {
    use kvlane_proto::v1::{NamespaceStatus, SsdStatus};

    use super::*;

    /// An engine without requests was shown as "heard 7261.4 s ago", as if it were dead.
    #[test]
    fn an_engine_without_requests_is_idle() {
        let of = |role: &str, silent_ms| {
            state(&SessionStatus { role: role.into(), silent_ms, ..Default::default() }).0
        };
        assert_eq!(of("worker", 1500), "heard 1.5 s ago");
        assert_eq!(of("worker", 10_900), "heard 10.9 s ago", "the next heartbeat is due");
        assert_eq!(of("worker", 45_000), "idle for 45.0 s");
        assert_eq!(of("scheduler", 1_200_000), "idle for 20 min");
        assert_eq!(of("scheduler", 7_261_400), "idle for 2.0 h");
        assert_eq!(of("worker (lost)", 120_000), "lost, heard 2 min ago");
        let sessions = vec![SessionStatus { silent_ms: 60_000, ..Default::default() }];
        assert_eq!(to_json(&Status { sessions, ..Default::default() })["sessions"][0]["state"], "idle");
    }

    #[test]
    fn a_person_can_read_it() {
        let status = Status {
            version: "1.2.3".into(),
            pool_bytes: 4_000_000_000,
            used_bytes: 1_000_000_000,
            page_size: "4 kB".into(),
            sessions: vec![SessionStatus {
                session_id: 7,
                engine_id: "engine-a".into(),
                role: "worker".into(),
                silent_ms: 1500,
                method: "process_vm".into(),
                ..Default::default()
            }],
            ssd_blocks: 1234,
            policy: "auto".into(),
            active_policy: "arc".into(),
            shadow_hit_ratios: vec![ShadowHitRatio { policy: "lru".into(), hit_ratio: 0.125 }],
            blocks: 1500,
            not_admitted_blocks: 77,
            learnt: vec![LearntKind {
                blocks: "asked for 2 times".into(),
                seen: 12.0,
                ages: vec![0, 1000, 2000],
                hit_densities: vec![0.5, 0.25, 0.0],
            }],
            ssds: vec![SsdStatus {
                path: "/mnt/nvme0/blocks".into(),
                capacity_bytes: 2_000_000_000_000,
                method: "io_uring, direct".into(),
                ..Default::default()
            }],
            namespaces: vec![NamespaceStatus {
                namespace: vec![0xab; 16].into(),
                name: "llama".into(),
                hit_blocks: 1,
                missed_blocks: 3,
                ..Default::default()
            }],
            ..Default::default()
        };
        let text = to_text(&status);
        for wanted in [
            "25.0 %",
            "engine-a",
            "process_vm",
            "heard 1.5 s ago",
            "abababab",
            "llama",
            "1234 blocks",
            "auto, now arc; 77 blocks were not let in\n            of the pool alone shadow caches hit: lru 12.5 %\n",
            "asked for 2 times  12    500000  500000   250000\n",
            "/mnt/nvme0/blocks",
            "of 2.0 TB",
            "io_uring, direct",
        ] {
            assert!(text.contains(wanted), "{wanted} in\n{text}");
        }
    }

    #[test]
    fn the_layouts_of_a_namespace_are_shown_where_it_has_several() {
        let space = |namespace: u8, shards, layout: &str| NamespaceStatus {
            namespace: vec![namespace; 16].into(),
            shards,
            layout: layout.into(),
            ..Default::default()
        };
        let one = vec![space(1, 1, "32 layers, HNC"), space(2, 1, "48 layers"), space(1, 4, "")];
        let mut status = Status { namespaces: one, ..Default::default() };
        assert!(!to_text(&status).contains("layers"), "there is nothing to explain");
        status.namespaces.push(space(1, 2, "32 layers, NHC"));
        let text = to_text(&status);
        let (_, told) = text.split_once("only if their layouts are equal").unwrap();
        assert!(told.contains("32 layers, HNC") && told.contains("32 layers, NHC"), "{text}");
        assert!(!told.contains("48 layers"), "{text}");
        assert_eq!(to_json(&status)["namespaces"][1]["layout"], "48 layers");
    }
}
