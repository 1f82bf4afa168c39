//! The limit of open files, which decides how many others a daemon or a router can serve.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that each client or peer takes, and how many of them a host usually has.
pub(crate) struct Needs {
    /// The flag that sets how many are served.
    pub(crate) flag: &'static str,
    /// Plural of the noun that the flag counts: "clients".
    pub(crate) whom: &'static str,
    /// Descriptors of each of them.
    pub(crate) each: u64,
    /// Descriptors of the program itself.
    pub(crate) besides: u64,
    /// The program warns about a limit below this, even if the user asked for no number.
    pub(crate) usual: u64,
}

impl Needs {
    /// Number of clients or peers that the program can serve with this many open files.
    fn served(&self, files: u64) -> u64 {
        files.saturating_sub(self.besides) / self.each
    }

    /// A warning if the user asked for more than the limit allows, or if it allows less than usual.
    fn warning(&self, asked: Option<u64>, files: u64) -> Option<String> {
        let (flag, whom, served) = (self.flag, self.whom, self.served(files));
        let why = match asked {
            Some(asked) if asked > served => format!("{flag} {asked}: "),
            None if served < self.usual => String::new(),
            _ => return None,
        };
        Some(format!(
            "{why}this process may open {files} files, which is enough for about {served} {whom}; raise that limit \
             (ulimit -n, LimitNOFILE= of systemd)"
        ))
    }
}

/// Raises the limit as far as this process may, and warns if it stays too low. `asked` is the user's value of the flag. Returns
/// how many can be served; None means any number.
pub(crate) fn raise_limit(needs: &Needs, asked: Option<u64>) -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        // Log: the kernel refused to raise the limit of open files; the program goes on with the present one. Do:
        // raise it from outside (ulimit -n, LimitNOFILE= of systemd).
        tracing::warn!(%error, limit = ?limit.current, "cannot raise the limit of open files");
    }
    let files = getrlimit(Resource::Nofile).current?;
    if let Some(warning) = needs.warning(asked, files) {
        // Log "this process may open <files> files, which is enough for about <served> <whom>; raise that limit
        // (ulimit -n, LimitNOFILE= of systemd)": the limit of open files is too low for the connections wanted;
        // further ones are refused or wait. Do: raise the limit, or lower the flag that the line names.
        tracing::warn!("{warning}");
    }
    Some(needs.served(files))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENTS: Needs =
        Needs { flag: "--max-connections", whom: "clients", each: 2, besides: 100, usual: 500 };

    #[test]
    fn a_limit_that_is_enough_for_what_was_asked_is_no_warning() {
        assert_eq!(CLIENTS.warning(Some(100), 300), None);
        let warning = CLIENTS.warning(Some(101), 300).unwrap();
        assert!(warning.starts_with("--max-connections 101: this process may open 300 files"), "{warning}");
        assert!(warning.contains("enough for about 100 clients"), "{warning}");
    }

    #[test]
    fn where_nothing_was_asked_only_a_small_limit_is_a_warning() {
        assert_eq!(CLIENTS.warning(None, 4096), None);
        assert!(CLIENTS.warning(None, 1024).unwrap().starts_with("this process may open 1024 files"));
    }
}
