//! Checks the host name of HTTP requests, against DNS rebinding. Pure.
//!
//! A web page that a user of this host has open may send requests to 127.0.0.1. It can read the answers if its own name
//! resolves to that address for the moment (DNS rebinding). The browser then sends the page's host name, which is never
//! an address. Prometheus and probes use addresses, and other names can be given to the program with a flag.

use std::net::{IpAddr, SocketAddr};

use axum::http::{HeaderMap, StatusCode, Uri, Version, header::HOST, uri::Authority};

/// Why a request is not answered: the status, and a sentence.
pub type Misdirected = (StatusCode, String);

/// The names of a program besides addresses and `localhost`.
#[derive(Debug, Clone)]
pub struct Names {
    /// The program's word in the sentence of a refusal: "daemon".
    pub program: &'static str,
    /// The flag that adds a name.
    pub flag: &'static str,
    /// Names that the flag has added.
    pub given: Vec<String>,
}

impl Names {
    /// Checks that a request is meant for this program.
    ///
    /// # Errors
    /// 400 if the host is missing, stands there twice or is no host; 421 if it is another name.
    pub fn check(&self, version: Version, uri: &Uri, headers: &HeaderMap) -> Result<(), Misdirected> {
        let bad = |sentence: &str| (StatusCode::BAD_REQUEST, sentence.to_owned());
        // If the request line names a host too, both have to be right.
        if let Some(authority) = uri.authority() {
            self.check_authority(authority)?;
        }
        let mut hosts = headers.get_all(HOST).iter();
        match (hosts.next(), hosts.next()) {
            (None, _) if version < Version::HTTP_11 => Ok(()),
            (None, _) => Err(bad("the request names no host")),
            (Some(_), Some(_)) => Err(bad("the request names two hosts")),
            (Some(host), None) => {
                // Most clients name an address and a port.
                if host.to_str().is_ok_and(|host| host.parse::<SocketAddr>().is_ok()) {
                    return Ok(());
                }
                let authority = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
                self.check_authority(&authority.ok_or_else(|| bad("the request's host is no HOST:PORT"))?)
            }
        }
    }

    fn check_authority(&self, authority: &Authority) -> Result<(), Misdirected> {
        let host = authority.host();
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let is_ours = bare.parse::<IpAddr>().is_ok()
            || host.eq_ignore_ascii_case("localhost")
            || self.given.iter().any(|name| host.eq_ignore_ascii_case(name));
        if is_ours && !authority.as_str().contains('@') {
            return Ok(());
        }
        let Self { program, flag, .. } = self;
        let sentence = format!(
            "this {program} does not answer to the name '{host}': ask by its address, or start it with {flag} {host}"
        );
        Err((StatusCode::MISDIRECTED_REQUEST, sentence))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn names(given: &[&str]) -> Names {
        Names {
            program: "daemon",
            flag: "--http-host",
            given: given.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    fn status(host: Option<&str>, uri: &str) -> u16 {
        let mut headers = HeaderMap::new();
        headers.extend(host.map(|host| (HOST, host.parse().unwrap())));
        match names(&["metrics.example"]).check(Version::HTTP_11, &uri.parse().unwrap(), &headers) {
            Ok(()) => 200,
            Err((status, _)) => status.as_u16(),
        }
    }

    #[test]
    fn addresses_localhost_and_the_names_that_were_given_are_ours() {
        for host in ["127.0.0.1", "10.1.2.3:9091", "[::1]:9091", "[fe80::1]", "localhost", "LocalHost:80"] {
            assert_eq!(status(Some(host), "/health"), 200, "{host}");
        }
        assert_eq!(status(Some("Metrics.Example:9091"), "/health"), 200);
        for host in
            ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "0x7f000001", "a@127.0.0.1"]
        {
            assert_eq!(status(Some(host), "/health"), 421, "{host}");
        }
        for host in ["", "two words", "127.0.0.1:port:port"] {
            assert_eq!(status(Some(host), "/health"), 400, "{host}");
        }
    }

    #[test]
    fn a_host_is_needed_and_only_one() {
        assert_eq!(status(None, "/health"), 400);
        assert_eq!(status(Some("127.0.0.1"), "http://evil.example/health"), 421);
        let (uri, mut headers) = (Uri::from_static("/health"), HeaderMap::new());
        assert!(names(&[]).check(Version::HTTP_10, &uri, &headers).is_ok(), "browsers speak newer versions");
        for host in ["127.0.0.1", "evil.example"] {
            headers.append(HOST, host.parse().unwrap());
        }
        assert_eq!(
            names(&[]).check(Version::HTTP_11, &uri, &headers).unwrap_err().0,
            StatusCode::BAD_REQUEST
        );
    }

    #[test]
    fn who_is_refused_hears_which_flag_to_give() {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, "kvlane.svc:9091".parse().unwrap());
        let (_, sentence) = names(&[]).check(Version::HTTP_11, &Uri::from_static("/"), &headers).unwrap_err();
        assert!(sentence.contains("--http-host kvlane.svc"), "{sentence}");
    }
}
