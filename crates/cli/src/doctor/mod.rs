//! `kvlane doctor`: what of this machine kvlane can use, one file a subject.
//!
//! Each subject reads its facts, then judges them in a pure function.

mod bound;
mod cluster;
mod daemon;
mod engine_config;
mod files;
mod finding;
mod gpu;
mod hugepages;
mod io_uring;
mod kernel;
mod memory;
mod numa;
mod ssd;
mod unused;
mod vllm;
mod workers;

use std::{env, io, path::Path, process::ExitCode};

use clap::Args;
use finding::{Finding, Verdict};
use kvlane_gpu::Drivers;
use kvlane_memory::Available;
use kvlane_proto::Address;
use serde_json::json;

use crate::{errors, serve_options::DEFAULT_POOL, size::Size, status::DaemonArgs, terminal};

/// The columns of marks and subjects.
const MARK_WIDTH: usize = 7;
const SUBJECT_WIDTH: usize = 15;

/// Changes nothing. The exit status is 1 when something keeps `kvlane serve` or the engine from working here, else 0.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Size of the pool to check for: 4gb, 512mib, or plain bytes [default: 4gb]
    #[arg(long, env = "KVLANE_POOL_SIZE", value_name = "SIZE")]
    pool_size: Option<Size>,
    /// Look at an engine's configuration too: the JSON that is given to vLLM's --kv-transfer-config, or a file with it
    #[arg(long, value_name = "JSON")]
    engine_config: Option<String>,
    #[command(flatten)]
    cluster: cluster::ClusterArgs,
    /// Explain also what is in order
    #[arg(long)]
    verbose: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Examines all subjects and prints the findings.
pub(crate) fn run(args: &DoctorArgs, drivers: Drivers) -> ExitCode {
    let address = match args.daemon.address() {
        Ok(address) => address,
        Err(error) => return errors::print_error(&error),
    };
    let daemon = daemon::read(&address, args.daemon.user());
    let pool = args.pool_size.unwrap_or(Size(DEFAULT_POOL));
    let mut findings = examine(Path::new("/"), &address, &daemon, pool, drivers);
    findings.extend(cluster::examine(&args.cluster, daemon.cluster()));
    if let Some(config) = &args.engine_config {
        findings.extend(engine_config::examine(config));
    }
    if args.json {
        println!("{:#}", to_json(&findings));
    } else {
        let style = Style { verbose: args.verbose, coloured: terminal::has_colours(&io::stdout()) };
        print!("{}", to_text(&findings, style));
    }
    ExitCode::from(u8::from(count(&findings, Verdict::Problem) > 0))
}

fn examine(
    root: &Path,
    address: &Address,
    daemon: &daemon::Facts,
    pool: Size,
    drivers: Drivers,
) -> Vec<Finding> {
    let running = daemon.is_running();
    let gpu = gpu::read(root, drivers);
    let gpus = match &gpu {
        gpu::Facts::Driver { gpus, .. } => gpus.as_slice(),
        _ => &[],
    };
    let numa = numa::read(root, gpus.iter().map(|gpu| (gpu.info.ordinal, &*gpu.info.pci_bus_id)));
    let hugepages = hugepages::Facts::read(root);
    let available = Available::under(root);
    let pool_memory = match running {
        true => memory::PoolMemory::Taken,
        false if hugepages.hold(pool) => memory::PoolMemory::HugePages,
        false => memory::PoolMemory::Available,
    };
    let seed = env::var_os("PYTHONHASHSEED").map(|seed| seed.to_string_lossy().into_owned());

    let mut findings = vec![daemon::judge(daemon, address)];
    findings.push(memory::judge(&available, pool, pool_memory));
    findings.push(hugepages::judge(&hugepages, pool, running));
    findings.push(memory::judge_locked(&memory::Locked::read(root), pool));
    findings.push(io_uring::judge(&io_uring::Facts::read(root)));
    findings.extend(ssd::judge(daemon.ssds(), &hugepages.reserve(pool)));
    findings.push(numa::judge(&numa));
    findings.push(kernel::judge(&kernel::Facts::read(root)));
    findings.push(workers::judge(&workers::Facts::read(root)));
    findings.extend(bound::judge(&bound::Facts::read(root)));
    findings.extend(gpu::judge(&gpu));
    findings.push(vllm::judge(&vllm::read()));
    findings.push(vllm::judge_hash_seed(seed.as_deref()));
    findings.extend(unused::judge(&unused::Facts::read(root)));
    findings
}

fn count(findings: &[Finding], verdict: Verdict) -> usize {
    findings.iter().filter(|finding| finding.verdict == verdict).count()
}

fn to_json(findings: &[Finding]) -> serde_json::Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "problems": count(findings, Verdict::Problem),
        "notes": count(findings, Verdict::Note),
        "findings": findings,
    })
}

/// The style of findings for people.
#[derive(Debug, Clone, Copy, Default)]
struct Style {
    /// Explain also what is in order.
    verbose: bool,
    coloured: bool,
}

fn to_text(findings: &[Finding], style: Style) -> String {
    let mut text = String::new();
    let indent = " ".repeat(MARK_WIDTH + 2);
    for finding in findings {
        let mark = format!("{:MARK_WIDTH$}", finding.verdict.word());
        let mark = if style.coloured { colour(&mark, finding.verdict) } else { mark };
        text.push_str(&format!("{mark}  {:SUBJECT_WIDTH$}  {}\n", finding.subject, finding.found));
        if style.verbose || finding.verdict != Verdict::Ok {
            for (word, line) in [("means", &finding.means), ("do", &finding.advice)] {
                if !line.is_empty() {
                    text.push_str(&format!("{indent}{word:5}  {line}\n"));
                }
            }
        }
    }
    let number = |verdict, word: &str| match count(findings, verdict) {
        0 => format!("no {word}"),
        1 => format!("1 {word}"),
        n => format!("{n} {word}s"),
    };
    let conclusion = match count(findings, Verdict::Problem) {
        0 => "kvlane works here",
        _ => "kvlane does not work here as it is",
    };
    text.push_str(&format!(
        "\n{conclusion}: {}, {}\n",
        number(Verdict::Problem, "problem"),
        number(Verdict::Note, "note")
    ));
    text
}

fn colour(mark: &str, verdict: Verdict) -> String {
    let code = match verdict {
        Verdict::Ok => 32,
        Verdict::Note => 33,
        Verdict::Problem => 31,
    };
    format!("\x1b[{code}m{mark}\x1b[0m")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Vec<Finding> {
        vec![
            Finding::ok("numa", "one node").means("nothing much"),
            Finding::note("daemon", "none").means("no cache").advice("start one"),
        ]
    }

    #[test]
    fn what_is_in_order_takes_one_line_unless_more_is_wanted() {
        let text = to_text(&findings(), Style::default());
        let wanted = "ok       numa             one node\n\
                      note     daemon           none\n         means  no cache\n         do     start one\n\n\
                      kvlane works here: no problem, 1 note\n";
        assert_eq!(text, wanted);
        assert!(to_text(&findings(), Style { verbose: true, ..Style::default() }).contains("nothing much"));
        assert!(
            to_text(&findings(), Style { coloured: true, ..Style::default() })
                .contains("\x1b[33mnote   \x1b[0m  daemon")
        );
    }

    #[test]
    fn a_problem_is_counted_and_concluded_from() {
        let mut findings = findings();
        findings.push(Finding::problem("kernel", "too old"));
        assert!(to_text(&findings, Style::default()).ends_with("as it is: 1 problem, 1 note\n"));
        let json = to_json(&findings);
        assert_eq!((&json["problems"], &json["notes"]), (&json!(1), &json!(1)));
        assert_eq!(json["findings"][1]["verdict"], "note");
        assert_eq!(json["findings"][1]["advice"], "start one");
    }

    #[test]
    fn every_subject_is_looked_at_on_a_machine_that_tells_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Unix(folder.path().join("kvlane.sock"));
        let nobody = daemon::Facts::Nobody;
        let findings = examine(folder.path(), &address, &nobody, Size(1 << 20), kvlane_gpu::driver_named);
        for subject in [
            "daemon",
            "memory",
            "huge pages",
            "locked memory",
            "numa",
            "kernel",
            "reading workers",
            "gpu driver",
            "vllm",
            "hash seed",
            "rdma",
            "libfabric",
            "io_uring",
            "gdrcopy",
        ] {
            let found = findings.iter().find(|finding| finding.subject == subject);
            assert!(found.is_some_and(|finding| !finding.found.is_empty()), "{subject} in {findings:?}");
        }
        assert!(findings.iter().all(|finding| finding.verdict == Verdict::Ok || !finding.advice.is_empty()));
    }
}
