//! The flags by which a program exports spans and metrics to an OpenTelemetry collector.

use std::{fs, path::Path};

use anyhow::{Context, Result, anyhow, bail};
use kvlane_otlp::{Endpoint, Settings};

use crate::secret_file;

/// Largest file of authorities.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Where to export; None without an endpoint. `service` is the program's name there, and `instance` tells it from others.
pub(crate) fn settings(
    endpoint: Option<&str>,
    headers_file: Option<&Path>,
    authority_file: Option<&Path>,
    service: &'static str,
) -> Result<Option<Settings>> {
    let Some(endpoint) = endpoint.filter(|endpoint| !endpoint.is_empty()) else {
        if headers_file.is_some() || authority_file.is_some() {
            bail!("--otlp-headers-file and --otlp-ca-file are of no use without --otlp-endpoint");
        }
        return Ok(None);
    };
    // The message leaves the text out, because it may hold a password.
    let endpoint: Endpoint = endpoint.parse().map_err(|error| anyhow!("--otlp-endpoint: {error}"))?;
    if authority_file.is_some() && !endpoint.is_secure() {
        bail!("--otlp-ca-file is of no use with http: write https://HOST:4318 as --otlp-endpoint");
    }
    let headers = headers_file.map(read_headers).transpose()?.unwrap_or_default();
    let authority = authority_file.map(read_authority).transpose()?;
    let instance = kvlane_memory::random::<8>().context("the kernel gives no random bytes")?;
    let instance = instance.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Some(Settings { endpoint, headers, authority, service, instance }))
}

fn read_authority(path: &Path) -> Result<Vec<u8>> {
    let cannot = || format!("--otlp-ca-file {}: cannot be read", path.display());
    if fs::metadata(path).with_context(cannot)?.len() > FILE_BYTES_MAX {
        bail!("--otlp-ca-file {}: it has more than {FILE_BYTES_MAX} bytes", path.display());
    }
    fs::read(path).with_context(cannot)
}

/// One `Name: value` a line, in a file that other users may not read. Errors leave the values out, because they are secret.
fn read_headers(path: &Path) -> Result<Vec<(String, String)>> {
    let header = |(number, line): (usize, &String)| {
        let parts = line.split_once(':').map(|(name, value)| (name.trim(), value.trim()));
        let is_name = |name: &str| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        };
        let is_value = |value: &str| value.bytes().all(|byte| (32..127).contains(&byte));
        match parts.filter(|(name, value)| is_name(name) && is_value(value)) {
            Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
            None => bail!(
                "--otlp-headers-file {}, header {}: write it as Authorization: Bearer KEY",
                path.display(),
                number + 1
            ),
        }
    };
    secret_file::lines("--otlp-headers-file", path)?.iter().enumerate().map(header).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn headers_are_read_from_a_file() {
        let headers = file("Authorization: Bearer secret\n\nX-Scope-OrgID: a:b\n");
        let settings =
            settings(Some("http://127.0.0.1:4318"), Some(headers.path()), None, "kvlane").unwrap().unwrap();
        let wanted = [("Authorization", "Bearer secret"), ("X-Scope-OrgID", "a:b")];
        assert_eq!(settings.headers, wanted.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }

    #[test]
    fn mistakes_are_named_and_secrets_are_not() {
        let said = |endpoint: Option<&str>, headers: &str, authority: bool| {
            let headers = file(headers);
            let authority = authority.then_some(Path::new("/nowhere"));
            let error = settings(endpoint, Some(headers.path()), authority, "kvlane").unwrap_err();
            let text = format!("{error:#}");
            assert!(!text.contains("secret"), "{text}");
            text
        };
        for (text, wanted) in [
            (said(None, "a: b", false), "are of no use without --otlp-endpoint"),
            (said(Some("http://me:secret@host"), "a: b", false), "it holds credentials"),
            (said(Some("host:4318"), "a: b", false), "it has no scheme: write http://"),
            (said(Some("http://h"), "secret", false), "header 1: write it as Authorization"),
            (said(Some("http://h"), "a: b", true), "--otlp-ca-file is of no use with http"),
            (said(Some("https://h"), "a: b", true), "--otlp-ca-file /nowhere: cannot be read"),
        ] {
            assert!(text.contains(wanted), "{text}");
        }
        assert!(settings(None, None, None, "kvlane").unwrap().is_none());
        assert!(settings(Some(""), None, None, "kvlane").unwrap().is_none(), "an empty variable is none");
    }
}
