//! vLLM beside this binary, and the hash seed of its engines.

use std::{
    io::Read,
    path::Path,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use serde::Deserialize;

use crate::{doctor::finding::Finding, doctor::kernel::version, python};

/// The versions of vLLM that are supported.
const SUPPORTED: std::ops::RangeInclusive<(u32, u32)> = (0, 24)..=(0, 33);
/// Longest wait for an interpreter, which takes seconds on a slow disk.
const LIMIT: Duration = Duration::from_secs(15);
const SEED: &str = "PYTHONHASHSEED";

/// Reads only the metadata of packages: importing vLLM or torch would take long and may take a GPU.
const SCRIPT: &str = r#"
import json, platform, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
names = ("vllm", "torch", "kvlane", "pip")
versions = {name: version(name) for name in names}
print(json.dumps({"python": platform.python_version(), "executable": sys.executable, **versions}))
"#;

/// The versions that an interpreter reports.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Packages {
    python: String,
    executable: String,
    vllm: Option<String>,
    torch: Option<String>,
    kvlane: Option<String>,
    pip: Option<String>,
}

/// Asks the interpreter that `kvlane bench` would use.
pub(crate) fn read() -> Result<Packages, String> {
    ask(&python::interpreter(), LIMIT)
}

fn ask(interpreter: &Path, limit: Duration) -> Result<Packages, String> {
    let name = interpreter.display();
    let mut child = Command::new(interpreter)
        .args(["-c", SCRIPT])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("{name} cannot be run: {error}"))?;
    let (sender, receiver) = mpsc::channel();
    let output = child.stdout.take();
    thread::spawn(move || {
        let mut text = String::new();
        if output.is_some_and(|mut output| output.read_to_string(&mut text).is_ok()) {
            // The receiver is gone if the answer took too long.
            let _ = sender.send(text);
        }
    });
    let answer = receiver.recv_timeout(limit);
    // The child is killed and not waited for, because one that hangs in the kernel does not die either.
    let _ = child.kill();
    match answer {
        Ok(text) => {
            serde_json::from_str(&text).map_err(|_| format!("{name} does not say which packages it has"))
        }
        Err(mpsc::RecvTimeoutError::Timeout) => {
            Err(format!("{name} does not answer within {} s", limit.as_secs()))
        }
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            Err(format!("{name} does not say which packages it has"))
        }
    }
}

pub(crate) fn judge(packages: &Result<Packages, String>) -> Finding {
    let packages = match packages {
        Ok(packages) => packages,
        Err(error) => {
            return Finding::note("vllm", error.clone())
                .means("`kvlane bench` and `kvlane demo` do not run here; the daemon does not need Python")
                .advice("engines may have an environment of their own: install kvlane there too");
        }
    };
    let Packages { python, executable, vllm, torch, kvlane, pip } = packages;
    let one = |name: &str, version: &Option<String>| match version {
        Some(version) => format!("{name} {version}"),
        None => format!("no {name}"),
    };
    let found = format!(
        "{}, {}, {} in Python {python} ({executable})",
        one("vLLM", vllm),
        one("torch", torch),
        one("kvlane", kvlane)
    );
    let (first, last) = (SUPPORTED.start(), SUPPORTED.end());
    let range = format!("{}.{} to {}.{}", first.0, first.1, last.0, last.1);
    let Some(installed) = vllm else {
        return Finding::note("vllm", found).means("no engine runs in this environment").advice(format!(
            "install kvlane in the environment that has vLLM ({range}); that may be another one"
        ));
    };
    if !version(installed).is_some_and(|version| SUPPORTED.contains(&version)) {
        return Finding::note("vllm", found)
            .means("kvlane was not tested with this version of vLLM")
            .advice(format!("use vLLM {range}"));
    }
    match kvlane.as_deref() {
        None => Finding::note("vllm", found)
            .means("vLLM does not find the connector here")
            .advice(match pip {
                Some(_) => format!("install kvlane's wheel there: `{executable} -m pip install kvlane-*.whl`"),
                None => format!(
                    "install kvlane's wheel there: `uv pip install --python {executable} kvlane-*.whl` (it has no pip)"
                ),
            }),
        Some(other) if other != env!("CARGO_PKG_VERSION") => Finding::note("vllm", found)
            .means(format!(
                "the connector here is of another version than this binary, {}",
                env!("CARGO_PKG_VERSION")
            ))
            .advice("install the same version of kvlane for engines and daemon"),
        Some(_) => Finding::ok("vllm", found).means(format!("vLLM {range} is supported")),
    }
}

/// `seed` is the variable of this environment; that of an engine may differ.
pub(crate) fn judge_hash_seed(seed: Option<&str>) -> Finding {
    match seed {
        Some(seed) => Finding::ok("hash seed", format!("{SEED} is {seed:?} in this environment"))
            .means("engines share blocks only with engines of the same value; it has to stay the same over restarts"),
        None => Finding::ok("hash seed", format!("{SEED} is not set in this environment")).means(format!(
            "kvlane fixes the seed of vLLM's sha256 hashes by itself; with --prefix-caching-hash-algo xxhash or \
             xxhash_cbor it stays random, and an engine finds neither blocks of others nor those of its last run, \
             unless all have the same {SEED}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, time::Instant};

    use super::*;
    use crate::doctor::finding::Verdict;

    fn packages(vllm: Option<&str>, kvlane: Option<&str>) -> Result<Packages, String> {
        let (vllm, kvlane) = (vllm.map(str::to_owned), kvlane.map(str::to_owned));
        Ok(Packages {
            python: "3.12.1".into(),
            executable: "/x/python3".into(),
            vllm,
            kvlane,
            pip: Some("25.0".into()),
            ..Default::default()
        })
    }

    const OWN: Option<&str> = Some(env!("CARGO_PKG_VERSION"));

    #[test]
    fn supported_versions_with_the_connector_are_in_order() {
        for vllm in ["0.24.0", "0.33.1", "0.32.0+cpu", "0.30.0rc1"] {
            assert_eq!(judge(&packages(Some(vllm), OWN)).verdict, Verdict::Ok, "{vllm}");
        }
        let found = judge(&packages(Some("0.32.0+cpu"), OWN)).found;
        assert!(found.starts_with("vLLM 0.32.0+cpu, no torch, kvlane"), "{found}");
        assert!(found.ends_with("in Python 3.12.1 (/x/python3)"), "{found}");
    }

    #[test]
    fn everything_else_is_a_note_that_says_what_to_do() {
        for (packages, wanted) in [
            (packages(Some("0.23.2"), OWN), "use vLLM 0.24 to 0.33"),
            (packages(Some("0.34.0"), OWN), "use vLLM 0.24 to 0.33"),
            (packages(Some("dev"), OWN), "use vLLM 0.24 to 0.33"),
            (packages(None, OWN), "that has vLLM"),
            (packages(Some("0.32.0"), None), "/x/python3 -m pip install kvlane-*.whl"),
            (packages(Some("0.32.0"), Some("99.0.0")), "same version"),
            (Err("python3 cannot be run".into()), "install kvlane there too"),
        ] {
            let found = judge(&packages);
            assert_eq!(found.verdict, Verdict::Note, "{found:?}");
            assert!(found.advice.contains(wanted), "{found:?}");
        }
    }

    #[test]
    fn an_environment_without_pip_is_not_told_to_use_it() {
        let no_pip = Packages { pip: None, ..packages(Some("0.32.0"), None).unwrap() };
        let found = judge(&Ok(no_pip));
        assert!(found.advice.contains("`uv pip install --python /x/python3 kvlane-*.whl`"), "{found:?}");
    }

    fn interpreter(folder: &tempfile::TempDir, script: &str) -> PathBuf {
        let path = folder.path().join("python3");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn an_interpreter_answers_or_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let answer = r#"echo '{"python": "3.1", "executable": "/p", "vllm": "0.32.0", "torch": null, "kvlane": null}'"#;
        let told = ask(&interpreter(&folder, answer), LIMIT).unwrap();
        assert_eq!((told.vllm.as_deref(), told.torch), (Some("0.32.0"), None));
        let error = ask(&interpreter(&folder, "echo nonsense"), LIMIT).unwrap_err();
        assert!(error.contains("does not say"), "{error}");
        let error = ask(&folder.path().join("none"), LIMIT).unwrap_err();
        assert!(error.contains("cannot be run"), "{error}");
        let start = Instant::now();
        let error = ask(&interpreter(&folder, "exec sleep 60"), Duration::from_millis(100)).unwrap_err();
        assert!(error.contains("does not answer") && start.elapsed() < Duration::from_secs(30), "{error}");
    }

    #[test]
    fn the_seed_is_a_fact() {
        assert!(judge_hash_seed(None).means.contains("xxhash"));
        assert!(judge_hash_seed(Some("0")).found.contains("\"0\""));
    }
}
