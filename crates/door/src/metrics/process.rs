//! Metrics of a program's own process, under the names that Prometheus' client libraries use.

use std::{
    fs,
    sync::OnceLock,
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::{
    param::{clock_ticks_per_second, page_size},
    process::{Resource, getrlimit},
    time::{ClockId, Timespec, clock_gettime},
};

use super::table::{MetricKind, Row, each};

/// The figures of this process at one moment. None if the kernel does not give a figure.
#[derive(Debug)]
pub struct Process {
    started: Option<f64>,
    cpu_seconds: f64,
    resident_bytes: Option<u64>,
    open_fds: Option<u64>,
    max_fds: Option<u64>,
}

/// The table of these metrics, which the daemon and the router append to their own.
pub const PROCESS_METRICS: &[Row<Process>] = &[
    each("kvlane_build_info", MetricKind::Gauge, "version", "1 for the version of this program.", |_| {
        vec![(vec![env!("CARGO_PKG_VERSION").to_owned()], 1.0)]
    }),
    each(
        "process_start_time_seconds",
        MetricKind::Gauge,
        "",
        "Start of the process, in seconds since 1970.",
        |process| one(process.started),
    ),
    each(
        "process_cpu_seconds_total",
        MetricKind::Counter,
        "",
        "CPU time of all threads, in user and system mode.",
        |process| one(Some(process.cpu_seconds)),
    ),
    each(
        "process_resident_memory_bytes",
        MetricKind::Gauge,
        "",
        "Memory of the process in RAM, shared memory included.",
        |process| one(process.resident_bytes.map(|bytes| bytes as f64)),
    ),
    each("process_open_fds", MetricKind::Gauge, "", "Open file descriptors.", |process| {
        one(process.open_fds.map(|count| count as f64))
    }),
    each("process_max_fds", MetricKind::Gauge, "", "Most file descriptors that may be open.", |process| {
        one(process.max_fds.map(|count| count as f64))
    }),
];

fn one(value: Option<f64>) -> Vec<(Vec<String>, f64)> {
    value.into_iter().map(|value| (Vec::new(), value)).collect()
}

impl Process {
    /// Reads all figures from the kernel.
    pub fn read() -> Self {
        // Read once, because a step of the clock must not look like a restart.
        static STARTED: OnceLock<Option<f64>> = OnceLock::new();
        Self {
            started: *STARTED.get_or_init(started),
            cpu_seconds: seconds(clock_gettime(ClockId::ProcessCPUTime)),
            resident_bytes: resident_bytes(),
            open_fds: open_fds(),
            max_fds: getrlimit(Resource::Nofile).current,
        }
    }
}

/// Seconds from 1970 to the start of this process.
fn started() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    let since_boot = ticks_at_start(&stat)? as f64 / clock_ticks_per_second() as f64;
    let age = seconds(clock_gettime(ClockId::Boottime)) - since_boot;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    Some(now.as_secs_f64() - age)
}

/// Clock ticks from boot to the start of the process, from its /proc/PID/stat: the 22nd field.
fn ticks_at_start(stat: &str) -> Option<u64> {
    // The second field, a name in parentheses, may hold spaces and parentheses.
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

fn resident_bytes() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * page_size() as u64)
}

fn open_fds() -> Option<u64> {
    // One of the descriptors is that of this listing.
    Some((fs::read_dir("/proc/self/fd").ok()?.count() as u64).saturating_sub(1))
}

fn seconds(time: Timespec) -> f64 {
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_hides_no_field() {
        let fields = (4..=52).map(|number| number.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(ticks_at_start(&format!("7 (a) S (b) R {fields}")), Some(22));
        assert_eq!(ticks_at_start("7 (a) R 4"), None);
    }

    #[test]
    fn this_process_has_figures() {
        let before = Process::read();
        let files: Vec<_> = (0..3).map(|_| fs::File::open("/proc/self/stat").unwrap()).collect();
        let after = Process::read();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        let started = after.started.unwrap();
        assert!(started < now + 1.0 && started > now - 24.0 * 3600.0, "{started} {now}");
        assert_eq!(before.started, after.started);
        assert!(after.cpu_seconds >= before.cpu_seconds && after.resident_bytes.unwrap() > 1 << 16);
        assert!(after.open_fds.unwrap() >= files.len() as u64);
    }
}
