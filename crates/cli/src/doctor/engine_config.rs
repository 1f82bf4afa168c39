//! An engine's configuration, as it is given to vLLM's --kv-transfer-config.
//!
//! The connector itself reads the configuration, in the interpreter beside this binary. So it finds what it would find in the
//! engine.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use kvlane_client::{DaemonUser, default_address};
use kvlane_proto::Address;
use serde::Deserialize;

use crate::{
    doctor::{
        daemon,
        finding::{Finding, Verdict},
    },
    python,
};

const SUBJECT: &str = "engine config";
const DAEMON: &str = "engine's daemon";
const MODULE: &str = "kvlane.connector.settings_check";

/// The connector's answer. See python/kvlane/connector/settings_check.py.
#[derive(Debug, Deserialize)]
struct Report {
    findings: Vec<Said>,
    /// None if the configuration cannot be read.
    daemon: Option<Wanted>,
}

#[derive(Debug, Deserialize)]
struct Said {
    verdict: Verdict,
    found: String,
    means: String,
    advice: String,
}

/// The daemon that the configuration names.
#[derive(Debug, Deserialize)]
struct Wanted {
    address: Option<String>,
    user: Option<String>,
    /// False if the engine hands over directly and uses a daemon only if one is there when it starts.
    is_needed: bool,
}

/// Checks the configuration, which is JSON or the name of a file with it, and looks for the daemon that its engine would use.
pub(crate) fn examine(config: &str) -> Vec<Finding> {
    let read = if config.trim_start().starts_with(['{', '[']) {
        Ok(config.to_owned())
    } else {
        std::fs::read_to_string(config)
            .map_err(|error| format!("'{config}' is neither JSON nor a file ({error})"))
    };
    let report = match read {
        Ok(json) => ask(&python::interpreter(), &json),
        Err(why) => {
            return vec![Finding::problem(SUBJECT, why).advice(
                "give the JSON of --kv-transfer-config in single quotes, or the name of a file with it",
            )];
        }
    };
    match report {
        Ok(report) => judge(report),
        Err(why) => vec![
            Finding::note(SUBJECT, why)
                .means("the configuration cannot be looked at here")
                .advice("run `kvlane doctor` in the environment of the engine, where kvlane is installed for Python too"),
        ],
    }
}

fn ask(interpreter: &Path, json: &str) -> Result<Report, String> {
    let name = interpreter.display();
    let mut child = Command::new(interpreter)
        .args(["-m", MODULE])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("{name} cannot be run: {error}"))?;
    if let Some(mut input) = child.stdin.take() {
        // An interpreter that does not read its input does not answer either, which the caller reports.
        let _ = input.write_all(json.as_bytes());
    }
    let answer = child.wait_with_output().map_err(|error| format!("{name} does not answer: {error}"))?;
    serde_json::from_slice(&answer.stdout).map_err(|_| format!("{name} has no {MODULE}"))
}

fn judge(report: Report) -> Vec<Finding> {
    let to_finding = |Said { verdict, found, means, advice }| Finding {
        subject: SUBJECT.into(),
        verdict,
        found,
        means,
        advice,
    };
    let mut findings: Vec<Finding> = report.findings.into_iter().map(to_finding).collect();
    findings.extend(report.daemon.as_ref().map(look_for));
    findings
}

/// Looks for the daemon by the same rules as an engine.
fn look_for(wanted: &Wanted) -> Finding {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let user = wanted.user.clone().or_else(|| variable("KVLANE_DAEMON_USER"));
    let user = match user.map(|user| user.parse::<DaemonUser>()).transpose() {
        Ok(user) => user.unwrap_or_default(),
        Err(error) => {
            return Finding::problem(DAEMON, error.to_string()).advice("name one in kvlane.daemon_user");
        }
    };
    let address = match wanted.address.clone().or_else(|| variable("KVLANE_ADDR")).map(|text| text.parse()) {
        None => default_address(),
        Some(Ok(address)) => address,
        Some(Err(error)) => {
            let error: kvlane_proto::AddressError = error;
            return Finding::problem(DAEMON, error.to_string()).advice("name its socket in kvlane.address");
        }
    };
    if let Address::Tcp(at) = address {
        return Finding::problem(DAEMON, format!("KVLANE_ADDR is {at}, a TCP address"))
            .means("the engine computes everything itself: engines use the daemon's Unix socket only")
            .advice("name the socket in kvlane.address: unix:PATH");
    }
    match daemon::read(&address, user) {
        daemon::Facts::Nobody if !wanted.is_needed => {
            Finding::ok(DAEMON, format!("none answers at {address}"))
                .means("an engine with this configuration hands prompts over directly and needs none")
        }
        daemon::Facts::Nobody => Finding::problem(DAEMON, format!("none answers at {address}"))
            .means("an engine with this configuration computes everything itself until there is one")
            .advice(format!(
                "start it with `kvlane serve --listen {address}`, or name another one in kvlane.address"
            )),
        facts => Finding { subject: DAEMON.into(), ..daemon::judge(&facts, &address) },
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn what_the_connector_says_is_told_and_its_daemon_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("kvlane.sock");
        let said = serde_json::json!({
            "findings": [{"verdict": "problem", "found": "a wrong key", "means": "m", "advice": "a"}],
            "daemon": {"address": format!("unix:{}", socket.display()), "user": null, "is_needed": true},
        });
        let interpreter = folder.path().join("python3");
        fs::write(&interpreter, format!("#!/bin/sh\ncat > /dev/null\necho '{said}'\n")).unwrap();
        fs::set_permissions(&interpreter, fs::Permissions::from_mode(0o755)).unwrap();
        let findings = judge(ask(&interpreter, "{}").unwrap());
        let told: Vec<_> = findings.iter().map(|each| (each.verdict, &*each.subject)).collect();
        assert_eq!(told, [(Verdict::Problem, SUBJECT), (Verdict::Problem, DAEMON)]);
        assert!(findings[0].found == "a wrong key" && findings[1].found.contains("kvlane.sock"));
        let user = look_for(&Wanted { address: None, user: Some("no such user".into()), is_needed: true });
        assert!(user.found.contains("'no such user'"), "{user:?}");
    }

    /// An engine that hands over directly was told that it does not work without a daemon.
    #[test]
    fn a_daemon_that_the_engine_can_do_without_is_no_problem() {
        let folder = tempfile::tempdir().unwrap();
        let address = Some(format!("unix:{}", folder.path().join("kvlane.sock").display()));
        for (is_needed, verdict) in [(true, Verdict::Problem), (false, Verdict::Ok)] {
            let found = look_for(&Wanted { address: address.clone(), user: None, is_needed });
            assert_eq!(found.verdict, verdict, "{found:?}");
        }
    }

    #[test]
    fn what_cannot_be_looked_at_is_said() {
        let none = examine("/nonexistent/engine.json");
        assert!(none[0].verdict == Verdict::Problem && none[0].found.contains("'/nonexistent/engine.json'"));
        let folder = tempfile::tempdir().unwrap();
        let interpreter = folder.path().join("python3");
        fs::write(&interpreter, "#!/bin/sh\nexit 1\n").unwrap();
        fs::set_permissions(&interpreter, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(ask(&interpreter, "{}").unwrap_err().contains(MODULE));
    }
}
