//! Whether a daemon answers.

use std::{io::ErrorKind, os::unix::fs::FileTypeExt, time::Duration};

use kvlane_client::{ConnectError, DaemonUser, Tool, ToolError};
use kvlane_proto::{
    Address,
    v1::{ClusterStatus, SsdStatus},
};

use crate::doctor::finding::Finding;

/// The process at the address.
#[derive(Debug)]
pub(crate) enum Facts {
    /// A daemon of this version. The cluster is None without one, and if the daemon does not show it over this address.
    Answers { version: String, cluster: Option<ClusterStatus>, ssds: Vec<SsdStatus> },
    /// No process listens; a daemon can be started.
    Nobody,
    /// A file that is no socket, in the place of one.
    Blocked,
    /// The error of a process that does not answer as a daemon should, as a sentence.
    Unwell(String),
}

pub(crate) fn read(address: &Address, user: DaemonUser) -> Facts {
    if let Address::Unix(path) = address
        && std::fs::symlink_metadata(path).is_ok_and(|found| !found.file_type().is_socket())
    {
        return Facts::Blocked;
    }
    match Tool::connect_to_user(address, user, Duration::from_secs(2)) {
        Ok(mut tool) => {
            let version = tool.version().to_owned();
            let status = tool.status().unwrap_or_default();
            tool.close();
            Facts::Answers { version, cluster: status.cluster, ssds: status.ssds }
        }
        Err(ToolError::Connect(ConnectError::Refused { error, .. }))
            if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) =>
        {
            Facts::Nobody
        }
        Err(error) => Facts::Unwell(error.to_string()),
    }
}

impl Facts {
    /// Whether a daemon has its pool already.
    pub(crate) fn is_running(&self) -> bool {
        matches!(self, Self::Answers { .. })
    }

    /// The SSDs of a running daemon.
    pub(crate) fn ssds(&self) -> &[SsdStatus] {
        match self {
            Self::Answers { ssds, .. } => ssds,
            _ => &[],
        }
    }

    /// The other daemons, as a running one sees them.
    pub(crate) fn cluster(&self) -> Option<&ClusterStatus> {
        match self {
            Self::Answers { cluster, .. } => cluster.as_ref(),
            _ => None,
        }
    }
}

pub(crate) fn judge(facts: &Facts, address: &Address) -> Finding {
    let own = env!("CARGO_PKG_VERSION");
    match facts {
        Facts::Answers { version, .. } if version == own => {
            Finding::ok("daemon", format!("kvlane {version} answers at {address}"))
        }
        Facts::Answers { version, .. } => {
            Finding::note("daemon", format!("kvlane {version} answers at {address}, this binary is {own}"))
                .means("they share a version of the protocol, but not all of their fixes and features")
                .advice("restart the daemon from this binary; its cache starts empty")
        }
        Facts::Nobody => Finding::note("daemon", format!("none answers at {address}"))
            .means("engines compute everything themselves until there is one")
            .advice("start one with `kvlane serve`, or name its address with --addr or KVLANE_ADDR"),
        Facts::Blocked => Finding::problem("daemon", format!("{address} exists and is no socket"))
            .means("`kvlane serve` does not start there")
            .advice("remove the file, or choose another --listen and name it to the engines"),
        Facts::Unwell(sentence) => Finding::problem("daemon", sentence.clone())
            .means("another daemon does not start there, and engines compute everything themselves")
            .advice("see who listens there and its log, and restart it"),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::net::UnixListener};

    use super::*;
    use crate::doctor::finding::Verdict;

    #[test]
    fn nobody_there_and_a_file_in_the_way() {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Unix(folder.path().join("kvlane.sock"));
        let Address::Unix(path) = &address else { unreachable!() };
        assert!(matches!(read(&address, DaemonUser::default()), Facts::Nobody));
        drop(UnixListener::bind(path).unwrap());
        assert!(
            matches!(read(&address, DaemonUser::default()), Facts::Nobody),
            "a socket of a daemon that died"
        );
        assert_eq!(judge(&Facts::Nobody, &address).verdict, Verdict::Note);
        fs::remove_file(path).unwrap();
        fs::write(path, "data").unwrap();
        let found = judge(&read(&address, DaemonUser::default()), &address);
        assert_eq!(found.verdict, Verdict::Problem);
        assert!(found.found.contains("kvlane.sock exists and is no socket"), "{}", found.found);
    }

    #[test]
    fn one_that_listens_and_says_nothing_is_a_problem() {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Unix(folder.path().join("kvlane.sock"));
        let Address::Unix(path) = &address else { unreachable!() };
        let _listener = UnixListener::bind(path).unwrap();
        let facts = read(&address, DaemonUser::default());
        assert!(matches!(facts, Facts::Unwell(_)), "{facts:?}");
        assert_eq!(judge(&facts, &address).verdict, Verdict::Problem);
    }

    #[test]
    fn versions_are_compared() {
        let address = Address::Unix("/x".into());
        let same =
            Facts::Answers { version: env!("CARGO_PKG_VERSION").into(), cluster: None, ssds: Vec::new() };
        assert_eq!(judge(&same, &address).verdict, Verdict::Ok);
        assert!(same.is_running());
        let other = Facts::Answers { version: "99.0.0".into(), cluster: None, ssds: Vec::new() };
        assert_eq!(judge(&other, &address).verdict, Verdict::Note);
    }
}
